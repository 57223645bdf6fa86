"""Forward kernel of improved clustered attention on TPUs; `improved_tpu` describes the algorithm.

In shapes, T is the number of queries, X of keys, C of clusters, R of best keys of a cluster, and W
of 32-bit words of a key and its value; K and E are the widths of a key and of a value. A step of a
loop processes 256 queries or keys if nothing else is said.
"""

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
    CentroidStatistics,
    ClusterResults,
    ImprovedKernelInputs,
    ImprovedKernelSettings,
    QueryTile,
    add_partial_sums,
    centroid_logits,
    gather_by_label,
    gather_lanes,
    membership,
    partial_sum_rows,
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
    """Computes the output of all queries of one head of a lane (row of the batch), and the results
    that the backward pass needs.

    The arguments from `logits` on are scratch memory.

    Args:
      inputs: references to the inputs of one step of the grid.
      y: reference to the output [E, T].
      results: references to further outputs, the results of each cluster. The tiles of queries read
        the results, and so does the backward pass.
      logits: [X, C], float32, for the centroids' logits.
      lists: [256, C], float32, for the sorted lists with which `best_tpu` finds the best keys.
      packed: [W, X], int32, for the bits of keys and values.
      rows: [8 R, 128], float32, for the dot products of 128 queries and R best keys, each as eight
        partial sums in eight consecutive rows.
      settings: static settings of the kernel.
    """
    counts = _compute_centroids(inputs, results.means)
    means = results.means[...].astype(inputs.keys.dtype)

    def write_logits(step: Any, _: None) -> None:
        """Writes the centroids' logits of the 256 keys of a step to the scratch memory `logits`."""
        place = pl.ds(step * STEP_KEYS, STEP_KEYS)
        logits[place] = centroid_logits(inputs, means, place)

    unrolled_loop(logits.shape[0] // STEP_KEYS, write_logits)
    best, count = _choose_best_keys(logits, lists, counts, results, settings)
    rest = _attend_to_rest(inputs, logits, results.rest)
    statistics = CentroidStatistics(rest, best, 1 / jnp.maximum(counts[:1], 1), count)
    results.statistics[...] = jnp.concatenate([*statistics, jnp.zeros((4, CLUSTERS))], axis=0)
    _gather_best_keys(inputs, packed, results, settings)
    common = (1 - statistics.mass) * results.rest[...]

    def attend_tile(step: Any, _: None) -> None:
        """Writes the output of the 128 queries of tile number `step`: the query's own attention to
        the best keys of its cluster, plus the centroid's attention to all other keys.
        """
        tile = QueryTile(inputs, results, step)
        for r in range(settings.top_k):
            rows[partial_sum_rows(r)] = tile.partial_dot_products(tile.queries, tile.keys(r))
        weights = tile.weights(add_partial_sums(rows)) * tile.statistics.mass
        read = gather_by_label(common, tile.labels)
        for r in range(settings.top_k):
            read += weights[r : r + 1] * tile.values(r)
        y[:, tile.place] = jnp.where(tile.labels < settings.used, read, 0).astype(y.dtype)

    jax.lax.fori_loop(0, y.shape[1] // LANES, attend_tile, None)


def _compute_centroids(inputs: ImprovedKernelInputs, means: Any) -> Float[Array, "8 C"]:
    """Writes the centroids and returns the number of members of each cluster."""
    dtype = inputs.queries.dtype
    ones = jnp.ones((16, STEP_KEYS), dtype)
    means[...] = jnp.zeros_like(means)

    def sum_members(step: Any, counts: Array) -> Array:
        """Adds the 256 queries of a step to the sums of each cluster's queries in `means`.

        Returns `counts`, the number of queries of each cluster so far, plus the numbers of this
        step. `counts` and the result have 16 equal rows [16, C], which is the number of rows of a
        register of bfloat16 numbers.
        """
        place = pl.ds(step * STEP_KEYS, STEP_KEYS)
        members = membership(inputs, place)
        means[...] += dot_float32(inputs.queries[:, place], members, NT)
        return counts + dot_float32(ones, members, NT)

    steps = inputs.queries.shape[1] // STEP_KEYS
    counts = unrolled_loop(steps, sum_members, jnp.zeros((16, CLUSTERS), jnp.float32))[:SUBLANES]
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
    threshold, position_limit = best_tpu.best_threshold(logits, values, counts, settings.top_k)

    def separate_best(step: Any) -> Array:
        """Replaces the logits of the best keys among the 256 keys of a step by MASKED, so that only
        the logits of other keys remain. Saves a bit for each key, which is set for best keys.

        Returns, for each cluster and key, minus the key's position if it is a best key of the
        cluster, and otherwise minus `NO_KEY`. The largest of these numbers are thus the negative
        positions of the best keys; the smallest position comes first.
        """
        rows, places = best_tpu.step_rows(logits, step), best_tpu.step_places(step, lanes)
        best = best_tpu.is_best(rows, places, threshold, position_limit)
        masked = jnp.where(best, MASKED, rows)
        logits[pl.ds(step * STEP_KEYS, STEP_KEYS)] = masked.reshape(STEP_KEYS, lanes)
        ones = jnp.where(best, 1, 0)
        bits = functools.reduce(jnp.bitwise_or, (ones[j] << j for j in range(LIST_LENGTH)))
        results.bits[pl.ds(step * SUBLANES, SUBLANES)] = bits
        return jnp.where(best, -places, -NO_KEY)

    places = -best_tpu.largest_values(steps, separate_best, lists)[:, 0]
    results.places[...] = jnp.minimum(places, logits.shape[0]).astype(jnp.int32)
    count = jnp.sum(jnp.where(places < NO_KEY, 1.0, 0.0), axis=0, keepdims=True)
    values = values[: settings.top_k, 0]
    top = jnp.maximum(values[:1], FLOOR)
    total = jnp.sum(jnp.exp(values - top), axis=0, keepdims=True) + jnp.exp(FLOOR - top)
    return top + jnp.log(total), count


def _attend_to_rest(inputs: ImprovedKernelInputs, logits: Any, rest: Any) -> Float[Array, "1 C"]:
    """Writes the centroids' attention outputs over all but their best keys, whose logits are masked
    in `logits`; returns the log-sum-exp.
    """
    steps = logits.shape[0] // STEP_KEYS

    def update_maximum(step: Any, top: Array) -> Array:
        """Returns `top`, the largest logit of each centroid so far, updated by the keys of this
        step.

        `top` and the result have 8 partial maxima for each cluster, [8, C].
        """
        return jnp.maximum(top, jnp.max(best_tpu.step_rows(logits, step), axis=0))

    top = unrolled_loop(steps, update_maximum, jnp.full((SUBLANES, CLUSTERS), FLOOR))
    top = jnp.max(top, axis=0, keepdims=True)
    rest[...] = jnp.zeros_like(rest)

    def add_values(step: Any, total: Array) -> Array:
        """Adds the values of this step's keys, multiplied by the softmax weights before their
        normalization, to `rest`.

        Returns `total` [1, C], the sum of each centroid's weights so far, plus the weights of this
        step.
        """
        place = pl.ds(step * STEP_KEYS, STEP_KEYS)
        weights = jnp.exp(logits[place] - top)
        rest[...] += dot_float32(inputs.values[:, place], weights.astype(inputs.values.dtype), NN)
        return total + jnp.sum(weights, axis=0, keepdims=True)

    total = unrolled_loop(steps, add_values, jnp.zeros_like(top)) + jnp.exp(FLOOR - top)
    rest[...] = rest[...] / total
    return top + jnp.log(total)


def _gather_best_keys(
    inputs: ImprovedKernelInputs,
    packed: Any,
    results: ClusterResults,
    settings: ImprovedKernelSettings,
) -> None:
    """Copies each cluster's best keys and values to `results.words`, `KEYS_AT_ONCE` keys at a time.

    For these keys, a loop reads all keys of the head in tiles of 128.
    """
    size = inputs.keys.shape[0] * inputs.keys.dtype.itemsize // 4
    steps = inputs.keys.shape[1] // LANES

    def pack_keys(step: Any, _: None) -> None:
        """Copies the bits of the 128 keys and values of tile number `step` to `packed`."""
        at = pl.ds(step * LANES, LANES)
        packed[:size, at] = pltpu.bitcast(inputs.keys[:, at], jnp.int32)
        packed[size:, at] = pltpu.bitcast(inputs.values[:, at], jnp.int32)

    unrolled_loop(steps, pack_keys)

    def gather_group(group: Any, _: None) -> None:
        """Writes a group of `KEYS_AT_ONCE` best keys of each cluster, and their values, to
        `results.words`.

        Group i has the best keys from index i * `KEYS_AT_ONCE` on; `group` is i.
        """
        shape = packed.shape[0], CLUSTERS
        rows = [group * KEYS_AT_ONCE + j for j in range(KEYS_AT_ONCE)]
        places = [jnp.broadcast_to(results.places[pl.ds(r, 1)], shape) for r in rows]

        def take_from_tile(step: Any, words: list[Array]) -> list[Array]:
            """Returns `words`, the bits of the group's best keys and their values, after filling in
            the best keys that are among the 128 keys of this step.

            `words` has an array [W, C] for each of the `KEYS_AT_ONCE` best keys of a cluster.
            """
            current = packed[:, pl.ds(step * LANES, LANES)]
            return [
                jnp.where(place >> _COLUMN == step, gather_lanes(current, place & LANES - 1), old)
                for place, old in zip(places, words, strict=True)
            ]

        nothing = [jnp.zeros(shape, jnp.int32)] * KEYS_AT_ONCE
        words = jax.lax.fori_loop(0, steps, take_from_tile, nothing, unroll=2)
        for r, place_words in zip(rows, words, strict=True):
            results.words[r] = place_words

    jax.lax.fori_loop(0, -(-settings.top_k // KEYS_AT_ONCE), gather_group, None)
