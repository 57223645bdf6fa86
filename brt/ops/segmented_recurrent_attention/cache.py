"""The same for a few target positions at a time, from what depends on the source alone.

table  all states R: M H K^2 numbers of a source, half as many as its keys and values at
       S = K, four times as many at S = K / 8
carry  the neurons where decoding has come to: 3 H K^2 numbers, and one pass over a segment
       for each that decoding reaches

A cache is that of a source, not of its beams: reordering beams leaves it alone.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from brt.config import CrossAttention
from brt.ops.segmented_recurrent_attention.accumulate_fire import accumulate, fire
from brt.ops.segmented_recurrent_attention.recurrence import (
    Parameters,
    effective,
    neuron_inputs,
    output_scale,
    own_sums,
    recurrence,
    sum_segments,
)
from brt.ops.segmented_recurrent_attention.segments import pace, segment_index
from brt.ops.segmented_recurrent_attention.windows import (
    Shared,
    Windows,
    mixed,
    read_window,
    with_shared,
)


class Carry(NamedTuple):
    """The neurons of each source after a segment; -1: before the first.

    Attributes:
      membrane, total: U and the sum of all A_j, float32.
      states: R of the segment.
      parameters: those of the layer.
    """

    segment: Int[Array, " B"]
    membrane: Float[Array, "B H K K"]
    states: Float[Array, "B H K K"]
    total: Float[Array, "B H K K"]
    parameters: Parameters


class Cache(NamedTuple):
    """Windows with sources first, and what decoding needs beside them."""

    keys: Float[Array, "B M H S K"]
    values: Float[Array, "B M H S K"]
    mask: Bool[Array, "B M S"]
    counts: Int[Array, " B"]
    shared: Shared | None
    table: Float[Array, "B M H K K"] | None
    carry: Carry | None
    scale: Float[Array, "B H 1 K"] | None
    sigma: Float[Array, ""] | None


def prefill(windows: Windows, parameters: Parameters, config: CrossAttention) -> Cache:
    """What decoding reads, once for each source; of which form `config.cache` says."""
    keys, values, mask = (
        jnp.moveaxis(x, 0, 1) for x in (windows.keys, windows.values, windows.mask)
    )
    cache = Cache(
        keys, values, mask, windows.counts, windows.shared, None, None, None, parameters.sigma
    )
    if config.kind != "srformer":
        return cache
    if _form(config, keys.shape[-1]) == "table":
        states, scale, _ = recurrence(
            windows.keys, windows.values, windows.counts, parameters, config
        )
        return cache._replace(table=jnp.moveaxis(states, 0, 1), scale=scale)
    total = sum_segments(own_sums(windows.keys, windows.values, parameters, config))
    zeros = jnp.zeros_like(total)
    carry = Carry(
        jnp.full_like(windows.counts, -1), zeros, zeros.astype(keys.dtype), total, parameters
    )
    return cache._replace(carry=carry, scale=output_scale(windows.keys, parameters, config))


def _form(config: CrossAttention, width: int) -> str:
    if config.cache != "auto":
        return config.cache
    # The table is then no larger than the keys and values.
    return "table" if 2 * config.segment_size >= width else "carry"


def advance(cache: Cache, t: Int[Array, ""], config: CrossAttention) -> Cache:
    """Takes a carried recurrence on to target position t; other caches need no such thing.

    A `step` at t does it by itself but keeps nothing of it: advance first, or every step
    begins where the cache stands. Positions must not decrease.
    """
    if cache.carry is None:
        return cache
    return cache._replace(carry=_advance(cache, cache.carry, t, config))


def _advance(cache: Cache, carry: Carry, t: Int[Array, ""], config: CrossAttention) -> Carry:
    target = segment_index(t[None], cache.counts, pace(config, None))[:, 0]
    return jax.lax.while_loop(
        lambda carry: jnp.any(carry.segment < target),
        lambda carry: _next(cache, carry, carry.segment < target, config),
        carry,
    )


def _next(cache: Cache, carry: Carry, moves: Bool[Array, " B"], config: CrossAttention) -> Carry:
    """One more segment for the sources that move."""
    segment = carry.segment + moves
    keys, values = (_take(x, segment[:, None])[:, 0] for x in (cache.keys, cache.values))
    own = own_sums(keys, values, carry.parameters, config)
    membrane = states = neuron_inputs(own[None], carry.total, carry.parameters, config)[0]
    if config.use_raf:
        leak, threshold = effective(carry.parameters, config)
        membrane = accumulate(carry.membrane, membrane, leak, threshold)
        states = fire(membrane, threshold)

    def chosen(new: Array, old: Array) -> Array:
        return jnp.where(moves[:, None, None, None], new.astype(old.dtype), old)

    return carry._replace(
        segment=segment,
        membrane=chosen(membrane, carry.membrane),
        states=chosen(states, carry.states),
    )


def _take(x: Shaped[Array, "B M *R"], index: Int[Array, "B P"]) -> Shaped[Array, "B P *R"]:
    if x.shape[1] == 1:
        return x
    return jax.vmap(lambda x, i: x.at[i].get(mode="promise_in_bounds"))(x, jnp.maximum(index, 0))


def step(
    queries: Float[Array, "B N T H K"],
    cache: Cache,
    t: Int[Array, ""],
    config: CrossAttention,
) -> Float[Array, "B N T H K"]:
    """See `api.step`."""
    batch, beams, length, heads, width = queries.shape
    if cache.keys.shape[1] == 1:  # one window: all queries of a source side by side
        positions = t[None]
        rows = queries.reshape(batch, 1, beams * length, heads, width).swapaxes(2, 3)
    else:
        positions = t + jnp.arange(length, dtype=jnp.int32)
        rows = queries.transpose(0, 2, 3, 1, 4)  # [B, T, H, N, K]
    index = segment_index(positions, cache.counts, pace(config, None))
    attended = recurrent = None
    if config.use_segment:
        attended = read_window(rows, *_window(cache, index))
    if cache.table is not None or cache.carry is not None:
        states = _states(cache, index, positions, config)
        recurrent = jnp.einsum("bphnc,bphce->bphne", rows, states)
        if cache.scale is not None:
            recurrent = recurrent * cache.scale[:, None].astype(rows.dtype)
    y = mixed(attended, recurrent, cache.sigma)
    if len(positions) == length:
        return y.transpose(0, 3, 1, 2, 4)
    return y.swapaxes(2, 3).reshape(queries.shape)


def _window(
    cache: Cache, index: Int[Array, "B P"]
) -> tuple[Float[Array, "B P H Y K"], Float[Array, "B P H Y K"], Bool[Array, "B P Y"]]:
    """Keys, values and which of them are usable, for each position."""
    keys, values, mask = (_take(x, index) for x in (cache.keys, cache.values, cache.mask))
    return with_shared(keys, values, mask, cache.shared, axis=1)


def _states(
    cache: Cache, index: Int[Array, "B P"], positions: Int[Array, " P"], config: CrossAttention
) -> Float[Array, "B P H K K"]:
    """R for each position."""
    if cache.table is not None:
        return _take(cache.table, index)

    def body(carry: Carry, t: Int[Array, ""]) -> tuple[Carry, Float[Array, "B H K K"]]:
        carry = _advance(cache, carry, t, config)
        return carry, carry.states

    return jnp.moveaxis(jax.lax.scan(body, cache.carry, positions)[1], 0, 1)
