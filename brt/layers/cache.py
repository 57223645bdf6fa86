"""The cached keys and values that a segment attends to, the cache after the segment, and attention
of tokens to their window and to the sinks of their document.

Queries and keys get their rotary positions here. A position counts from the beginning of the
segment, or of the block that is read token by token, so that angles stay exact however long a
document is. The letters of shapes are those of `brt.layers.state`; S is the number of sinks.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.config import Kernels, Model
from brt.distributed.rules import constrain
from brt.layers.state import (
    LONGEST,
    Given,
    LocalState,
    Sinks,
    WindowState,
    cache_of,
    has_null_keys,
    zero_where_invalid,
)
from brt.ops import window_attention
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
from brt.ops.window_attention import last_block, local_attention


class TokenProjections(NamedTuple):
    """Queries, keys and values of tokens as they were projected, before attention normalises,
    scales and rotates queries and keys.
    """

    queries: Float[Array, "B T H K"]
    keys: Float[Array, "B T G K"]
    values: Float[Array, "B T G K"]
    cross_queries: Float[Array, "B T H K"] | None  # Queries to states; None if states are not read.
    residual: Float[Array, "B T D"]  # The input of the layer.


class KVCache(NamedTuple):
    """The cached keys and values of the W tokens before a segment.

    Attributes:
      cache_mask: True where block n may attend to the block before it.
      first: the place of the first token of the document to which block n belongs, counted in
        tokens from the start of the segment. A document that began before the segment has a
        negative place. None if the layer's state is a `WindowState`.
      sinks: [B, N, S, G, K], the first S tokens of the document to which block n belongs; None in
        models without sinks.
    """

    keys: Float[Array, "B W G K"]
    values: Float[Array, "B W G K"]
    cache_mask: Bool[Array, "B N"]
    first: Int[Array, "B N"] | None = None
    sinks: Sinks | None = None

    def joined(self, tokens: TokenProjections) -> tuple[Array, Array]:
        """Returns keys and values, each [B, W+T, G, K]: those of the cache, followed by those of
        the segment. The keys are not normalised. If tokens are sharded, every device gathers all of
        them.
        """
        names = ("lanes", None, "kv_heads", None)
        pairs = (self.keys, tokens.keys), (self.values, tokens.values)
        keys, values = (jnp.concatenate([old, constrain(x, *names)], axis=1) for old, x in pairs)
        return keys, values


def with_cache(
    model: Model, given: Given, projections: TokenProjections
) -> tuple[KVCache, WindowState | LocalState]:
    """Returns the cache that a segment attends to, and the cache after the segment."""
    state, document_start = cache_of(given.state), constrain(given.document_start, "lanes", None)
    if isinstance(state, LocalState):
        return _with_local_cache(model, state, projections, document_start)
    rows = state.valid & ~document_start[:, 0]
    state = state._replace(valid=rows)
    if not model.sliding.mask_empty_cache:
        state = zero_where_invalid(state)
    cache_mask = (
        jnp.concatenate([rows[:, None], ~document_start[:, 1:]], axis=1) & model.sliding.cache
    )
    cache_mask = constrain(cache_mask, "lanes", None)
    keys, values = (last_block(x, model.window) for x in (projections.keys, projections.values))
    after = WindowState(keys, values, jnp.ones_like(state.valid))
    return KVCache(state.keys, state.values, cache_mask), after


def _with_local_cache(
    model: Model,
    state: LocalState,
    projections: TokenProjections,
    document_start: Bool[Array, "B N"],
) -> tuple[KVCache, LocalState]:
    blocks, tokens = document_start.shape[1], projections.keys.shape[1]
    block_starts = jnp.arange(blocks, dtype=jnp.int32)[None] * (tokens // blocks)
    first = jnp.where(document_start, block_starts, -state.length[:, None])
    # Each block belongs to the document that started last at this block or before it. Blocks before
    # the first document start of the segment continue the document of the state.
    first = jax.lax.cummax(first, axis=1)
    length = jnp.minimum(tokens - first[:, -1], LONGEST)
    if not model.sliding.cache:
        first, length = jnp.broadcast_to(block_starts, first.shape), jnp.zeros_like(length)
    cache = KVCache(state.keys, state.values, first < block_starts, first)
    keys, values = (x[:, -model.window :] for x in cache.joined(projections))
    if state.sinks is None:
        return cache, LocalState(keys, values, length)
    sinks = _block_sinks(state.sinks, projections, first)
    last = Sinks(*(part[:, -1] for part in sinks))
    return cache._replace(sinks=sinks), LocalState(keys, values, length, last)


def _block_sinks(sinks: Sinks, tokens: TokenProjections, first: Int[Array, "B N"]) -> Sinks:
    # Returns, for each block, the first S tokens of the block's document, [B, N, S, G, K]. If a
    # document has fewer than S tokens up to the end of the segment, the missing entries have
    # arbitrary values, which no query may read.
    order = jnp.arange(sinks.keys.shape[1], dtype=jnp.int32)
    places = first[:, :, None] + order[None, None]
    names = ("lanes", None, "kv_heads", None)

    def gathered(old: Float[Array, "B S G K"], new: Float[Array, "B T G K"]) -> Array:
        # A sink with a negative place was read before the segment, so it is in the state (`old`).
        rows = jnp.clip(places, 0, new.shape[1] - 1).reshape(len(new), -1, 1, 1)
        found = jnp.take_along_axis(constrain(new, *names), rows, axis=1)
        found = found.reshape(*places.shape, *new.shape[2:])
        return jnp.where((places < 0)[..., None, None], old[:, None], found)

    return Sinks(gathered(sinks.keys, tokens.keys), gathered(sinks.values, tokens.values))


def closed_window(model: Model, given: Given) -> WindowState | LocalState:
    """Returns the keys and values of the last W tokens after all tokens of a block have been read
    one by one into the ring buffer of the open block.
    """
    state, block = cache_of(given.state), given.block
    if isinstance(state, WindowState):
        return WindowState(block.keys, block.values, jnp.ones_like(state.valid))
    # If the block and the ring buffer differ in length, the oldest token of the buffer is not at
    # index 0. Rolling the buffer moves this token to index 0.
    keys, values = (jnp.roll(x, -model.block_length, axis=1) for x in (block.keys, block.values))
    length = jnp.minimum(state.length + model.block_length, LONGEST) * model.sliding.cache
    return LocalState(keys, values, length, block.sinks)


def speeds_of(model: Model) -> RotarySpeeds:
    """Returns the angles, in radians per token, by which each pair of channels is rotated."""
    r = model.rotary
    return rotary_speeds(
        r.channels or model.head_dim, base=r.base, divisors=r.divisors,
        factor=r.attention_factor,
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
      bias: the position bias of the W keys of a window, the nearest key first; None for no bias.
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
    if not m.window_is_block or m.attention.soft_cap:
        # For these models, the function `with_cache`, which made `past`, has set `first`, the place
        # where each block's document begins.
        assert past.first is not None
        return local_attention(
            queries, *inputs, bias, past.first, dropout, attend_to_self=m.sliding.attend_to_self,
            soft_cap=m.attention.soft_cap, scale=scale, implementation=kernels.window_attention,
        )  # fmt: skip

    # As in the authors' code of Block-Recurrent Transformers, all rows and blocks share one dropout
    # mask, so that only a mask of one window of queries and keys has to be drawn and read.
    mask = dropout and dropout.shared_mask(m.heads, m.window, m.window)
    return window_attention.window_part(
        queries, *inputs, bias, past.cache_mask, mask, attend_to_self=m.sliding.attend_to_self,
        null_keys=has_null_keys(m), scale=scale, implementation=kernels.window_attention,
    )  # fmt: skip


def document_places(past: KVCache, tokens: int) -> Int[Array, "B T"]:
    """Returns the place of each token in its document, 0 for the document's first token."""
    assert past.first is not None  # `with_cache` sets this field in all models with sinks.
    by_token = jnp.repeat(past.first, tokens // past.first.shape[1], axis=1)
    return jnp.arange(tokens, dtype=jnp.int32)[None] - by_token


def updated_sinks(sinks: Sinks, tokens: TokenProjections, places: Int[Array, "B T"]) -> Sinks:
    """Returns the sinks after T tokens with the indices `places` in their documents were read."""
    # `own` [B, S, T] is True where a token is the sink: both have the same index in the document.
    own = jnp.arange(sinks.keys.shape[1])[None, :, None] == places[:, None]
    found = jnp.any(own, axis=2)[:, :, None, None]

    def updated(old: Float[Array, "B S G K"], new: Float[Array, "B T G K"]) -> Array:
        taken = jnp.take_along_axis(new, jnp.argmax(own, axis=2)[:, :, None, None], axis=1)
        return jnp.where(found, taken, old)

    return Sinks(updated(sinks.keys, tokens.keys), updated(sinks.values, tokens.values))


def rotated_at(
    model: Model, x: Float[Array, "B T H K"], places: Int[Array, "B T"]
) -> Float[Array, "B T H K"]:
    """Applies rotary positions to queries or keys of an unfinished block and its window.

    Only the distance between a query and a key matters, so `places` count from the start of the
    block; tokens before the block have negative places, from -W.
    """
    if model.positions != "rotary":
        return x
    table = rotations(-model.window, model.window + model.block_length, speeds_of(model))
    return rotate(x, take_positions(table, model.window + places))
