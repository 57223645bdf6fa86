"""Attention of tokens to their window and to the sinks of their document, for given queries, keys
and values.

Functions of this module apply rotary positions to queries and keys. A position counts from the
beginning of the segment, or of the block that is read token by token, so that angles stay exact
however long a document is. The letters of shapes are those of `brt.layers.state`.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brt.config import Kernels, Model
from brt.layers.cache import KVCache, TokenProjections
from brt.layers.state import Sinks, has_null_keys
from brt.ops import sink_attention
from brt.ops.dropout import Dropout
from brt.ops.partial_attention import AttentionPart
from brt.ops.positions import (
    RotarySpeeds,
    Rotation,
    rotary_speeds,
    rotate,
    rotations,
    take_positions,
)
from brt.ops.window_attention import local_attention, segment_part


def speeds_of(model: Model) -> RotarySpeeds:
    """Returns the angles, in radians per token, by which each pair of channels is rotated."""
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
    """Returns the attention of the tokens of a segment to their window: output and log-sum-exp.

    Args:
      bias: the position bias by distance, the nearest key first; None for no bias.
      scale: the length to which the queries of each head are normalised; keys are then normalised
        to length 1. None means that queries and keys are not normalised here.
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
            scale=scale, implementation=kernels.window_attention,
        )  # fmt: skip

    # As in the authors' code of Block-Recurrent Transformers, all rows and blocks share one dropout
    # mask, so that only a mask of one window of queries and keys has to be drawn and read.
    mask = dropout and dropout.shared_mask(m.heads, m.window, m.window)
    return segment_part(
        queries, *inputs, bias, past.cache_mask, mask, attend_to_self=m.sliding.attend_to_self,
        null_keys=has_null_keys(m), scale=scale, implementation=kernels.window_attention,
    )  # fmt: skip


def document_places(past: KVCache, tokens: int) -> Int[Array, "B T"]:
    """Returns the place of each token in its document, 0 for the document's first token."""
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
      part: the attention to the window alone.
      queries: the queries, normalised and scaled, but without rotary positions.
      sinks: normalised keys, and values, [B, N, S, G, K], of the document of each block.
      places: the place of each token in its document, 0 for the first token.
      bias: the position bias of each head for all sinks; None for no bias.
    """
    return sink_attention.with_sinks(
        part, queries, *sinks, places, bias,
        farthest=model.window - 1 if model.sliding.attend_to_self else model.window,
        speeds=speeds_of(model) if model.positions == "rotary" else None,
    )  # fmt: skip


def updated_sinks(sinks: Sinks, tokens: TokenProjections, places: Int[Array, "B T"]) -> Sinks:
    """Returns the sinks after T tokens were read; `places` counts from each document's start."""
    # `own` is 1 where a token is a sink, with the axes [B, S, T].
    own = jnp.arange(sinks.keys.shape[1])[None, :, None] == places[:, None]
    found = jnp.any(own, axis=2)[:, :, None, None]

    def updated(old: Float[Array, "B S G K"], new: Float[Array, "B T G K"]) -> Array:
        taken = jnp.take_along_axis(new, jnp.argmax(own, axis=2)[:, :, None, None], axis=1)
        return jnp.where(found, taken, old)

    return Sinks(updated(sinks.keys, tokens.keys), updated(sinks.values, tokens.values))


def rotated_at(
    model: Model, x: Float[Array, "B T H K"], places: Int[Array, " T"]
) -> Float[Array, "B T H K"]:
    """Rotates queries or keys of tokens of an open block and of its window.

    Only the distance between a query and a key matters, so `places` count from the start of the
    block; tokens before the block have negative places, from -W.
    """
    if model.positions != "rotary":
        return x
    table = rotations(-model.window, model.window + model.block_length, speeds_of(model))
    return rotate(x, take_positions(table, model.window + places))
