"""Attention of tokens to their window and to the sinks of their document, for given queries, keys
and values.

Sinks are the first S tokens of a document, which stay visible when they have left the window. The
functions of this module apply rotary positions to queries and keys. A position counts from the
beginning of the segment, or of the block that is read token by token, so that angles stay exact
however long a document is.

In shapes, B is the number of rows of the batch, T the number of tokens of a segment, N the number
of its blocks, H the number of heads of queries, G the number of heads of keys and values, K the
size of a head, and W the number of keys in a window. Layers see the settings of the model with
their own window (`Model.for_layer`).
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brt.config import Kernels, Model
from brt.layers.cache import KVCache, TokenProjections
from brt.layers.state import Sinks, has_null_keys
from brt.ops import sink_attention
from brt.ops.dropout import Dropout
from brt.ops.local_attention import local_attention
from brt.ops.partial_attention import AttentionPart
from brt.ops.positions import (
    RotarySpeeds,
    Rotation,
    rotary_speeds,
    rotate,
    rotations,
    take_positions,
)
from brt.ops.window_attention import segment_part


def speeds_of(model: Model) -> RotarySpeeds:
    """Returns the angles, in radians per token of distance, by which rotary position embeddings
    rotate each pair of channels of a head, as the section `Rotary` of the settings `model` defines
    them.
    """
    r = model.rotary
    return rotary_speeds(
        model.head_dim, base=r.base, times_pi=r.times_pi, scaling=r.scaling, factor=r.factor,
        low_frequency=r.low_frequency, high_frequency=r.high_frequency,
        original_length=r.original_length,
    )  # fmt: skip


def window_part(
    model: Model,
    tokens: TokenProjections,
    past: KVCache,
    bias: Float[Array, "H W"] | None,
    *,
    scale: Float[Array, " H"] | None,
    dropout: Dropout | None,
    kernels: Kernels,
) -> AttentionPart:
    """Returns the attention of the tokens of a segment to their window.

    Args:
      model: the settings as the layer sees them.
      tokens: queries, keys and values of the segment.
      past: keys and values of the tokens before the segment.
      bias: the position bias of each head by distance, the nearest key first; None for no bias.
      scale: the length to which the queries of each head are normalised; keys are then normalised
        to length 1. None means that queries and keys are not normalised here.
      dropout: dropout of the attention weights, or None.
      kernels: the implementations of `brt.ops.window_attention` and `brt.ops.local_attention`.

    Returns:
      The output [B, T, H, K] and the log-sum-exp [B, T, H].
    """
    m, queries, keys, cached = model, tokens.queries, tokens.keys, past.keys
    if m.positions == "rotary":
        table = rotations(-m.window, m.window + queries.shape[1], speeds_of(m))
        own = Rotation(*(part[m.window :] for part in table))
        cached = rotate(cached, Rotation(*(part[: m.window] for part in table)))
        queries, keys = rotate(queries, own), rotate(keys, own)
    inputs = (cached, past.values), keys, tokens.values
    if not m.window_is_block:
        # The window and the block have different lengths. In this case, the function `with_cache`,
        # which made `past`, has set `first`, the place where each block's document begins.
        assert past.first is not None
        return local_attention(
            queries, *inputs, bias, past.first, dropout, attend_to_self=m.sliding.attend_to_self,
            scale=scale, implementation=kernels.local_attention,
        )  # fmt: skip

    # As in the authors' code of Block-Recurrent Transformers, all rows and blocks share one dropout
    # mask, so that only a mask of one window of queries and keys has to be drawn and read.
    mask = dropout and dropout.shared_mask(m.heads, m.window, m.window)
    return segment_part(
        queries, *inputs, bias, past.cache_mask, mask, attend_to_self=m.sliding.attend_to_self,
        null_keys=has_null_keys(m), scale=scale, implementation=kernels.window_attention,
    )  # fmt: skip


def document_places(past: KVCache, tokens: int) -> Int[Array, "B T"]:
    """Returns the place of each token of a segment in its document, 0 for the first token of the
    document.

    Args:
      past: the cache, which has the places where documents begin.
      tokens: T, the number of tokens of the segment.
    """
    assert past.first is not None  # `with_cache` sets this field in all models with sinks.
    by_token = jnp.repeat(past.first, tokens // past.first.shape[1], axis=1)
    return jnp.arange(tokens, dtype=jnp.int32)[None] - by_token


def with_sinks(
    model: Model,
    part: AttentionPart,
    queries: Float[Array, "B T H K"],
    sinks: Sinks,
    places: Int[Array, "B T"],
    bias: Float[Array, " H"] | None,
) -> AttentionPart:
    """Returns the attention of tokens to their window and to the sinks that have left the window.

    Args:
      model: the settings as the layer sees them.
      part: the attention to the window.
      queries: the queries, normalised and scaled, but without rotary positions.
      sinks: the normalised keys and the values, [B, N, S, G, K], of the first S tokens of the
        document to which each block belongs.
      places: the place of each token in its document, 0 for the first token.
      bias: the position bias of each head for all sinks; None for no bias.

    Returns:
      The output [B, T, H, K] and the log-sum-exp [B, T, H].
    """
    return sink_attention.with_sinks(
        part, queries, *sinks, places, bias,
        farthest=model.window - 1 if model.sliding.attend_to_self else model.window,
        speeds=speeds_of(model) if model.positions == "rotary" else None,
    )  # fmt: skip


def updated_sinks(sinks: Sinks, tokens: TokenProjections, places: Int[Array, "B T"]) -> Sinks:
    """Returns the sinks [B, S, G, K] after T tokens were read; they change only if one of these
    tokens is a sink.

    Args:
      sinks: the keys and values of the sinks before the tokens.
      tokens: the projections of the tokens.
      places: the place of each token in its document; the tokens at the first S places are sinks.
    """
    # `own` is 1 where a token is a sink, with the axes [B, S, T].
    own = jnp.arange(sinks.keys.shape[1])[None, :, None] == places[:, None]
    found = jnp.any(own, axis=2)[:, :, None, None]

    def updated(old: Float[Array, "B S G K"], new: Float[Array, "B T G K"]) -> Array:
        """Returns the keys or values of the sinks, of which some are among the new tokens."""
        taken = jnp.take_along_axis(new, jnp.argmax(own, axis=2)[:, :, None, None], axis=1)
        return jnp.where(found, taken, old)

    return Sinks(updated(sinks.keys, tokens.keys), updated(sinks.values, tokens.values))


def rotated_at(
    model: Model, x: Float[Array, "B T H K"], places: Int[Array, " T"]
) -> Float[Array, "B T H K"]:
    """Returns queries or keys of tokens of an open block and of its window with rotary positions.

    Only the distance between a query and a key matters, so places count from the start of the
    block; tokens before the block have negative places.

    Args:
      model: the settings as the layer sees them.
      x: the queries or keys, not rotated.
      places: the place of each token, from -W to the length of a block - 1.
    """
    if model.positions != "rotary":
        return x
    table = rotations(-model.window, model.window + model.block_length, speeds_of(model))
    return rotate(x, take_positions(table, model.window + places))
