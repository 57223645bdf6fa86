"""Selection of each cluster's best keys on TPUs, by sorting networks.

The best keys of a cluster are the keys with the largest logits of the cluster's centroid. Clusters
are along the lanes of vector registers and keys along the rows. For each cluster, each of the 8
sublanes has a sorted list of the 32 largest logits of the keys that it has seen; one register holds
the same place of all 8 lists.
For each step, a sorting network of maxima and minima sorts the next 32 logits of each sublane and
merges them with the sublane's list. The larger half of the result is kept. At the end the lists of
the 8 sublanes are merged in the same way. No step depends on the data or moves data within a
register.

The merged list's value at place k, where k is the number of best keys, is the threshold: the best
keys have at least this logit. If too many keys have exactly this logit, the first of them are
chosen, up to a position that a bisection determines. Finally the same network sorts the positions
of the best keys.

In shapes, X is the number of keys and C the number of clusters. A step processes 256 keys. The keys
of a step, and the lists of all sublanes, have the layout [32, 8, C]: 32 rows or places, 8 sublanes,
and the clusters along the lanes.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float

from brt.ops.softmax import MASKED

SUBLANES = 8
LIST_LENGTH = 32  # A sorted list of the largest logits has this many places.
STEP_KEYS = LIST_LENGTH * SUBLANES  # One step of a loop over the keys processes this many keys.
# The list of the positions of a cluster's best keys has 32 places, too. If there are fewer best
# keys, this number, which is greater than all positions of keys, fills the other places.
NO_KEY = 2.0**24

KeyLists = Float[Array, "32 8 C"]
# An array of this type has one number for each cluster, and all 8 sublanes have the same numbers.
PerCluster = Float[Array, "8 C"]


def step_rows(x: Any, step: Any) -> KeyLists:
    """Returns the rows of x [X, C] that belong to the 256 keys of a step, as an array [32, 8, C].

    Row 8 i + j of these 256 rows is entry [i, j], so that each vector register has 8 consecutive
    keys. `step` is the index of the step.
    """
    return x[pl.ds(step * STEP_KEYS, STEP_KEYS)].reshape(LIST_LENGTH, SUBLANES, -1)


def step_places(step: Any, lanes: int) -> KeyLists:
    """Returns the positions of the 256 keys of a step as float32 numbers, in the layout of
    `step_rows`.

    The first key of step 0 has position 0.

    Args:
      step: the index of the step.
      lanes: C, the number of columns of the result, which are all equal.
    """
    row, sublane = (
        jax.lax.broadcasted_iota(jnp.int32, (LIST_LENGTH, SUBLANES, lanes), axis) for axis in (0, 1)
    )
    return (step * STEP_KEYS + row * SUBLANES + sublane).astype(jnp.float32)


def largest_values(steps: int, rows: Callable[[Any], KeyLists], lists: Any) -> KeyLists:
    """Returns the 32 largest values of each cluster among the values of all keys.

    The values are along the first axis in descending order. All sublanes (the second axis) are
    equal.

    Args:
      steps: the number of steps, each of which processes 256 keys.
      rows: a function from the index of a step to the values of the step's keys, [32, 8, C], such
        as their logits.
      lists: [256, C], float32 scratch memory for the lists of the 8 sublanes, with 32 places each.
    """
    lists[...] = jnp.full(lists.shape, -jnp.inf)

    def process_step(step: Any, _: None) -> None:
        """Merges the values of the keys of a step into `lists`, which has the sorted largest values
        of the steps before.

        `step` is the index of the step.
        """
        lists[...] = _merge_lists(step_rows(lists, 0), _sort_lists(rows(step))).reshape(lists.shape)

    jax.lax.fori_loop(0, steps, process_step, None)
    results = step_rows(lists, 0)
    for shift in (4, 2, 1):
        results = _merge_lists(results, pltpu.roll(results, shift, 1))
    return results


def best_threshold(
    logits: Any, values: KeyLists, counts: PerCluster, top_k: int
) -> tuple[PerCluster, PerCluster]:
    """Returns the logit and the position that separate a cluster's best keys from the others.

    The best keys have a greater logit, or the same logit and a smaller position. The position
    matters only if several keys have the same logit.

    Args:
      logits: reference to the logits [X, C].
      values: the largest logits of each cluster, from `largest_values`.
      counts: the number of queries of each cluster. Empty clusters cause no search for a position,
        and their result has no meaning.
      top_k: the number of best keys.

    Returns:
      For each cluster, the smallest logit of its best keys (or a number between MASKED and all
        other logits, if there are fewer than `top_k` valid keys); and the position below which keys
        with exactly this logit are best keys.
    """
    # The threshold is greater than the logits of masked keys, so that a masked key is never a best
    # key.
    threshold = jnp.maximum(values[top_k - 1], MASKED / 2)
    steps, lanes = logits.shape[0] // STEP_KEYS, logits.shape[1]

    def count_best(position_limit: PerCluster) -> PerCluster:
        """Returns the number of keys of each cluster that are best keys if their positions must be
        below `position_limit`.

        Counted are the keys whose logit is greater than `threshold`, and the keys whose logit
        equals the threshold and whose position is below `position_limit`.
        """

        def add_step(step: Any, count: Array) -> Array:
            """Returns `count` [8, C], the number of best keys of each cluster and sublane so far,
            plus the number of best keys among the keys of a step.
            """
            best = is_best(
                step_rows(logits, step), step_places(step, lanes), threshold, position_limit
            )
            return count + jnp.sum(jnp.where(best, 1.0, 0.0), axis=0)

        count = jax.lax.fori_loop(0, steps, add_step, jnp.zeros_like(threshold))
        return jnp.broadcast_to(jnp.sum(count, axis=0, keepdims=True), count.shape)

    all_of_them = jnp.full_like(threshold, NO_KEY)
    too_many = jnp.where((count_best(all_of_them) > top_k) & (counts > 0), 1.0, 0.0)
    bits = logits.shape[0].bit_length()

    def bisect(step: Any, position_limit: PerCluster) -> PerCluster:
        """Returns the position limits after one step of a binary search for the largest limits with
        which each cluster has at most `top_k` best keys.

        Each step decides one bit of each limit, from the highest bit to the lowest. The bit is set
        if the cluster still has at most `top_k` best keys with the larger limit.

        Args:
          step: the index of the step; step 0 decides the highest bit.
          position_limit: the limits with the bits that earlier steps have set.
        """
        further = position_limit + (1 << (bits - 1 - step)).astype(jnp.float32)
        return jnp.where(count_best(further) > top_k, position_limit, further)

    rounds = jnp.where(jnp.max(too_many) > 0, bits, 0)
    position_limit = jax.lax.fori_loop(0, rounds, bisect, jnp.where(rounds > 0, 0.0, all_of_them))
    return threshold, position_limit


def is_best(
    rows: KeyLists, places: KeyLists, threshold: PerCluster, position_limit: PerCluster
) -> Bool[Array, "32 8 C"]:
    """Returns a mask of 256 keys, True for the best keys of each cluster.

    A key is a best key if its logit is greater than `threshold`, or if its logit equals `threshold`
    and its position is below `position_limit`.

    Args:
      rows: the logits of the 256 keys for each cluster's centroid.
      places: the positions of the keys.
      threshold, position_limit: the threshold of each cluster and the limit of positions, from
        `best_threshold`.
    """
    return (rows > threshold[None]) | ((rows == threshold[None]) & (places < position_limit[None]))


def _sort_lists(rows: KeyLists) -> KeyLists:
    """Sorts each list in descending order by Batcher's odd-even merge sort."""
    size = 1
    while size < LIST_LENGTH:
        apart = size
        while apart:
            blocks = rows.reshape(-1, 2 * size, *rows.shape[1:])
            # Rows at distance `apart` are compared. The first `edge` rows and the last `edge` rows
            # of a block have no partner and stay as they are.
            edge = apart if apart < size else 0
            inner = blocks[:, edge : 2 * size - edge]
            inner = _compare_exchange(inner.reshape(-1, *rows.shape[1:]), apart).reshape(
                inner.shape
            )
            parts = [blocks[:, :edge], inner, blocks[:, 2 * size - edge :]]
            rows = (jnp.concatenate(parts, axis=1) if edge else inner).reshape(rows.shape)
            apart //= 2
        size *= 2
    return rows


def _merge_lists(a: KeyLists, b: KeyLists) -> KeyLists:
    """Returns the larger half of two sorted lists, sorted by bitonic merging."""
    backwards = jnp.concatenate([b[i : i + 1] for i in reversed(range(LIST_LENGTH))], axis=0)
    rows, apart = jnp.maximum(a, backwards), LIST_LENGTH // 2
    while apart:
        rows = _compare_exchange(rows, apart)
        apart //= 2
    return rows


def _compare_exchange(rows: Float[Array, "N 8 C"], apart: int) -> Float[Array, "N 8 C"]:
    """Exchanges pairs of rows at distance `apart` so that the larger one comes first."""
    pairs = rows.reshape(-1, 2, apart, *rows.shape[1:])
    a, b = pairs[:, :1], pairs[:, 1:]
    return jnp.concatenate([jnp.maximum(a, b), jnp.minimum(a, b)], axis=1).reshape(rows.shape)
