"""Forward kernel of improved clustered attention on TPUs; see `improved_tpu`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from brt.ops.clustered_attention import best_tpu
from brt.ops.clustered_attention.best_tpu import LIST_LENGTH, NO_KEY, STEP_KEYS, SUBLANES
from brt.ops.clustered_attention.improved_tile import (
    CLUSTERS,
    KEYS_AT_ONCE,
    ClusterNumbers,
    ClusterResults,
    ImprovedKernelInputs,
    ImprovedKernelSettings,
    QueryTile,
    centroid_logits,
    eight_rows,
    gather_by_label,
    gather_lanes,
    membership,
    sum_eights,
)
from brt.ops.softmax import FLOOR, MASKED
from brt.ops.tpu import LANES, NN, NT, dot_float32, unrolled_loop

_COLUMN = LANES.bit_length() - 1


def forward_kernel(
    inputs: ImprovedKernelInputs,
    y: Any,
    results: ClusterResults,
    logits: Any,
    lists: Any,
    packed: Any,
    rows: Any,
    *,
    settings: ImprovedKernelSettings,
) -> None:
    """Computes the output and the clusters' results.

    Args:
      logits: [X, C], float32 scratch memory, as `lists` [256, C] and `rows` [8 R, 128].
      packed: [W, X], int32 scratch memory for the bits of keys and values.
    """
    counts = _compute_centroids(inputs, results.means)
    means = results.means[...].astype(inputs.keys.dtype)

    def weigh(step: Any, _: None) -> None:
        place = pl.ds(step * STEP_KEYS, STEP_KEYS)
        logits[place] = centroid_logits(inputs, means, place)

    unrolled_loop(logits.shape[0] // STEP_KEYS, weigh)
    best, count = _choose_best_keys(logits, lists, counts, results, settings)
    rest = _attend_to_rest(inputs, logits, results.rest)
    numbers = ClusterNumbers(rest, best, 1 / jnp.maximum(counts[:1], 1), count)
    results.numbers[...] = jnp.concatenate([*numbers, jnp.zeros((4, CLUSTERS))], axis=0)
    _gather_best_keys(inputs, packed, results, settings)
    common = (1 - numbers.mass) * results.rest[...]

    def attend(step: Any, _: None) -> None:
        tile = QueryTile(inputs, results, step)
        for r in range(settings.top_k):
            rows[eight_rows(r)] = tile.along(tile.queries, tile.keys(r))
        weights = tile.weights(sum_eights(rows)) * tile.numbers.mass
        read = gather_by_label(common, tile.labels)
        for r in range(settings.top_k):
            read += weights[r : r + 1] * tile.values(r)
        y[:, tile.place] = jnp.where(tile.labels < settings.used, read, 0).astype(y.dtype)

    jax.lax.fori_loop(0, y.shape[1] // LANES, attend, None)


def _compute_centroids(inputs: ImprovedKernelInputs, means: Any) -> Float[Array, "8 C"]:
    """Writes the centroids and returns the number of members of each cluster."""
    dtype = inputs.queries.dtype
    ones = jnp.ones((16, STEP_KEYS), dtype)
    means[...] = jnp.zeros_like(means)

    def gather(step: Any, counts: Array) -> Array:
        place = pl.ds(step * STEP_KEYS, STEP_KEYS)
        members = membership(inputs, place)
        means[...] += dot_float32(inputs.queries[:, place], members, NT)
        return counts + dot_float32(ones, members, NT)

    steps = inputs.queries.shape[1] // STEP_KEYS
    counts = unrolled_loop(steps, gather, jnp.zeros((16, CLUSTERS), jnp.float32))[:SUBLANES]
    divided = means[...] / jnp.maximum(counts[:1], 1)
    means[...] = divided.astype(dtype).astype(jnp.float32)
    return counts


def _choose_best_keys(
    logits: Any,
    lists: Any,
    counts: Float[Array, "8 C"],
    results: ClusterResults,
    settings: ImprovedKernelSettings,
) -> tuple[Float[Array, "1 C"], Float[Array, "1 C"]]:
    """Chooses the best keys and masks their logits; returns their log-sum-exp and their number."""
    steps, lanes = logits.shape[0] // STEP_KEYS, logits.shape[1]
    values = best_tpu.largest_values(steps, lambda step: best_tpu.step_rows(logits, step), lists)
    least, end = best_tpu.best_threshold(logits, values, counts, settings.top_k)

    def split(step: Any) -> Array:
        rows, places = best_tpu.step_rows(logits, step), best_tpu.step_places(step, lanes)
        best = best_tpu.is_best(rows, places, least, end)
        masked = jnp.where(best, MASKED, rows)
        logits[pl.ds(step * STEP_KEYS, STEP_KEYS)] = masked.reshape(STEP_KEYS, lanes)
        ones = jnp.where(best, 1, 0)
        bits = functools.reduce(jnp.bitwise_or, (ones[j] << j for j in range(LIST_LENGTH)))
        results.bits[pl.ds(step * SUBLANES, SUBLANES)] = bits
        return jnp.where(best, -places, -NO_KEY)

    places = -best_tpu.largest_values(steps, split, lists)[:, 0]
    results.places[...] = jnp.minimum(places, logits.shape[0]).astype(jnp.int32)
    count = jnp.sum(jnp.where(places < NO_KEY, 1.0, 0.0), axis=0, keepdims=True)
    values = values[: settings.top_k, 0]
    top = jnp.maximum(values[:1], FLOOR)
    total = jnp.sum(jnp.exp(values - top), axis=0, keepdims=True) + jnp.exp(FLOOR - top)
    return top + jnp.log(total), count


def _attend_to_rest(inputs: ImprovedKernelInputs, logits: Any, rest: Any) -> Float[Array, "1 C"]:
    """Writes the centroids' attention outputs over other keys; returns the log-sum-exp."""
    steps = logits.shape[0] // STEP_KEYS

    def highest(step: Any, top: Array) -> Array:
        return jnp.maximum(top, jnp.max(best_tpu.step_rows(logits, step), axis=0))

    top = unrolled_loop(steps, highest, jnp.full((SUBLANES, CLUSTERS), FLOOR))
    top = jnp.max(top, axis=0, keepdims=True)
    rest[...] = jnp.zeros_like(rest)

    def weigh(step: Any, total: Array) -> Array:
        place = pl.ds(step * STEP_KEYS, STEP_KEYS)
        weights = jnp.exp(logits[place] - top)
        rest[...] += dot_float32(inputs.values[:, place], weights.astype(inputs.values.dtype), NN)
        return total + jnp.sum(weights, axis=0, keepdims=True)

    total = unrolled_loop(steps, weigh, jnp.zeros_like(top)) + jnp.exp(FLOOR - top)
    rest[...] = rest[...] / total
    return top + jnp.log(total)


def _gather_best_keys(
    inputs: ImprovedKernelInputs,
    packed: Any,
    results: ClusterResults,
    settings: ImprovedKernelSettings,
) -> None:
    """Gathers the best keys and values, a few list places at a time, from 128 keys after
    the other.
    """
    size = inputs.keys.shape[0] * inputs.keys.dtype.itemsize // 4
    steps = inputs.keys.shape[1] // LANES

    def pack(step: Any, _: None) -> None:
        at = pl.ds(step * LANES, LANES)
        packed[:size, at] = pltpu.bitcast(inputs.keys[:, at], jnp.int32)
        packed[size:, at] = pltpu.bitcast(inputs.values[:, at], jnp.int32)

    unrolled_loop(steps, pack)

    def gather_group(group: Any, _: None) -> None:
        shape = packed.shape[0], CLUSTERS
        rows = [group * KEYS_AT_ONCE + j for j in range(KEYS_AT_ONCE)]
        places = [jnp.broadcast_to(results.places[pl.ds(r, 1)], shape) for r in rows]

        def look_up(step: Any, words: list[Array]) -> list[Array]:
            current = packed[:, pl.ds(step * LANES, LANES)]
            return [
                jnp.where(place >> _COLUMN == step, gather_lanes(current, place & LANES - 1), old)
                for place, old in zip(places, words, strict=True)
            ]

        nothing = [jnp.zeros(shape, jnp.int32)] * KEYS_AT_ONCE
        words = jax.lax.fori_loop(0, steps, look_up, nothing, unroll=2)
        for r, place_words in zip(rows, words, strict=True):
            results.words[r] = place_words

    jax.lax.fori_loop(0, -(-settings.top_k // KEYS_AT_ONCE), gather_group, None)
