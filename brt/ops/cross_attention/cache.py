"""Cross-attention of a few target positions, from a cache that depends on the source.

The state R of a segment summarizes the other segments, and accumulate-and-fire neurons compute it
from segment to segment. A cache has one of two forms:

  table: the cache has all states R, which are M H K^2 numbers per source. The keys and values of
    the source are twice as many numbers if S = K, and a quarter as many if S = K / 8.
  carry: the cache has the neurons at the current segment, 3 H K^2 numbers. Decoding advances the
    neurons once for each segment that it reaches.

The setting "auto" selects the table if it is not larger than the keys and values. A reordering of
beams does not change the cache. In shapes, M is the number of segments of S positions, N the number
of beams, and P the number of target positions.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from brt.ops.cross_attention.accumulate_fire import accumulate, fire
from brt.ops.cross_attention.config import CrossConfig
from brt.ops.cross_attention.parameters import CrossParameters
from brt.ops.cross_attention.recurrence import (
    RecurrenceParameters,
    key_value_sums,
    leak_and_threshold,
    neuron_inputs,
    output_scale,
    recurrence,
    sum_segments,
)
from brt.ops.cross_attention.segments import SharedKeys, segment_index
from brt.ops.cross_attention.windows import (
    attend_to_window,
    build_windows,
    combine_outputs,
    with_shared,
)


class NeuronCarry(NamedTuple):
    """The accumulate-and-fire neurons of each source, as they are at one segment of the source."""

    segment: Int[Array, " B"]  # the index of the segment; -1 before the first segment
    membrane: Float[Array, "B H K K"]  # float32, the potential U before the reset
    states: Float[Array, "B H K K"]  # the states R of the segment
    total: Float[Array, "B H K K"]  # float32, the sum over all segments j of `key_value_sums`
    parameters: RecurrenceParameters


class CrossCache(NamedTuple):
    """The arrays that decoding steps read, computed once for each source.

    Only the field `carry` changes during decoding. `table` and `carry` are None for kinds without a
    recurrence.
    """

    keys: Float[Array, "B M H S K"]
    values: Float[Array, "B M H S K"]
    mask: Bool[Array, "B M S"]  # True for usable keys, False for padding
    counts: Int[Array, " B"]  # the number of segments of each source
    shared: SharedKeys | None  # keys and values that queries of all segments read, too
    table: Float[Array, "B M H K K"] | None  # the states R; None if the form is "carry"
    carry: NeuronCarry | None  # state of the neurons; None if the form is "table"
    # The factor of each output feature of the recurrence; None stands for the factor 1.
    scale: Float[Array, "B H 1 K"] | None
    # The learned weight of the segment's softmax attention. The recurrence has the weight 1 -
    # sigma. None stands for the weight 1 of both.
    sigma: Float[Array, ""] | None


def prefill(
    keys: Float[Array, "B X H K"],
    values: Float[Array, "B X H K"],
    valid: Bool[Array, "B X"],
    parameters: CrossParameters,
    config: CrossConfig,
) -> CrossCache:
    """Returns the cache that `step` reads in decoding, shared by all beams of a source.

    The setting `config.cache` selects the form of the cache.
    """
    windows, learned = build_windows(keys, values, valid, parameters, config), parameters.raf
    keys, values, mask = (
        jnp.moveaxis(x, 0, 1) for x in (windows.keys, windows.values, windows.mask)
    )
    cache = CrossCache(
        keys, values, mask, windows.counts, windows.shared, None, None, None, learned.sigma
    )
    if config.kind != "srformer":
        return cache
    if _cache_form(config, keys.shape[-1]) == "table":
        states, scale, _ = recurrence(windows.keys, windows.values, windows.counts, learned, config)
        return cache._replace(table=jnp.moveaxis(states, 0, 1), scale=scale)
    total = sum_segments(key_value_sums(windows.keys, windows.values, learned, config))
    zeros = jnp.zeros_like(total)
    carry = NeuronCarry(
        jnp.full_like(windows.counts, -1), zeros, zeros.astype(keys.dtype), total, learned
    )
    return cache._replace(carry=carry, scale=output_scale(windows.keys, learned, config))


def _cache_form(config: CrossConfig, width: int) -> str:
    if config.cache != "auto":
        return config.cache
    # For each segment and head, the table has K * K numbers, and the keys and values have 2 * S * K
    # numbers. The table is therefore not larger if 2 S >= K.
    return "table" if 2 * config.segment_size >= width else "carry"


def advance(cache: CrossCache, t: int | Int[Array, ""], config: CrossConfig) -> CrossCache:
    """Returns the cache with its neurons advanced to the segment that target position t reads.

    The function `step` also advances the neurons but does not return them, so without `advance`
    every step advances them again. t must not decrease from call to call. Only the field `carry`
    changes. A cache without a carry is returned as it is.
    """
    if cache.carry is None:
        return cache
    return cache._replace(carry=_advance(cache, cache.carry, jnp.asarray(t, jnp.int32), config))


def _advance(
    cache: CrossCache, carry: NeuronCarry, t: Int[Array, ""], config: CrossConfig
) -> NeuronCarry:
    target = segment_index(t[None], cache.counts, config.q_ref)[:, 0]
    return jax.lax.while_loop(
        lambda carry: jnp.any(carry.segment < target),
        lambda carry: _advance_one(cache, carry, carry.segment < target, config),
        carry,
    )


def _advance_one(
    cache: CrossCache, carry: NeuronCarry, moves: Bool[Array, " B"], config: CrossConfig
) -> NeuronCarry:
    """Returns the neurons, advanced by one segment in the sources for which `moves` is True."""
    segment = carry.segment + moves
    keys, values = (_take_segments(x, segment[:, None])[:, 0] for x in (cache.keys, cache.values))
    sums = key_value_sums(keys, values, carry.parameters, config)
    membrane = states = neuron_inputs(sums[None], carry.total, carry.parameters, config)[0]
    if config.use_raf:
        leak, threshold = leak_and_threshold(carry.parameters)
        membrane = accumulate(carry.membrane, membrane, leak, threshold)
        states = fire(membrane, threshold)

    def select(new: Array, old: Array) -> Array:
        return jnp.where(moves[:, None, None, None], new.astype(old.dtype), old)

    return carry._replace(
        segment=segment,
        membrane=select(membrane, carry.membrane),
        states=select(states, carry.states),
    )


def _take_segments(x: Shaped[Array, "B M *R"], index: Int[Array, "B P"]) -> Shaped[Array, "B P *R"]:
    if x.shape[1] == 1:
        return x
    return jax.vmap(lambda x, i: x.at[i].get(mode="promise_in_bounds"))(x, jnp.maximum(index, 0))


def step(
    queries: Float[Array, "B N T H K"],
    cache: CrossCache,
    t: int | Int[Array, ""],
    config: CrossConfig,
) -> Float[Array, "B N T H K"]:
    """Returns the result of `api.attend` for T target positions from t on, for all beams.

    The cache comes from `prefill`, or from `advance` to a position up to t. If beams are reordered,
    the cache need not change, because all beams of a source share it.
    """
    t = jnp.asarray(t, jnp.int32)
    batch, beams, length, heads, width = queries.shape
    # If there is only one segment, all queries of a source read the same keys and values, so the
    # axes of beams and positions are merged into one.
    if cache.keys.shape[1] == 1:
        positions = t[None]
        rows = queries.reshape(batch, 1, beams * length, heads, width).swapaxes(2, 3)
    else:
        positions = t + jnp.arange(length, dtype=jnp.int32)
        # The axes of `rows` are [B, T, H, N, K].
        rows = queries.transpose(0, 2, 3, 1, 4)
    index = segment_index(positions, cache.counts, config.q_ref)
    attended = recurrent = None
    if config.use_segment:
        k, v, mask = (_take_segments(x, index) for x in (cache.keys, cache.values, cache.mask))
        attended = attend_to_window(rows, *with_shared(k, v, mask, cache.shared, axis=1))
    if cache.table is not None or cache.carry is not None:
        states = _states_at(cache, index, positions, config)
        recurrent = jnp.einsum("bphnc,bphce->bphne", rows, states)
    scale = None if cache.scale is None else cache.scale[:, None]
    y = combine_outputs(attended, recurrent, scale, cache.sigma)
    if len(positions) == length:
        return y.transpose(0, 3, 1, 2, 4)
    return y.swapaxes(2, 3).reshape(queries.shape)


def _states_at(
    cache: CrossCache,
    index: Int[Array, "B P"],
    positions: Int[Array, " P"],
    config: CrossConfig,
) -> Float[Array, "B P H K K"]:
    if cache.table is not None:
        return _take_segments(cache.table, index)

    def advance_to(
        carry: NeuronCarry, t: Int[Array, ""]
    ) -> tuple[NeuronCarry, Float[Array, "B H K K"]]:
        carry = _advance(cache, carry, t, config)
        return carry, carry.states

    return jnp.moveaxis(jax.lax.scan(advance_to, cache.carry, positions)[1], 0, 1)
