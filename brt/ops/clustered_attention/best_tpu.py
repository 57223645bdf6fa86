"""The keys that centroids attend to most, on TPUs: sorted lists that all keys pass by.

Clusters fill the lanes and keys go down. Each sublane has a list of the largest logits of the keys
it has seen, in order, a register for each place of the list. As many keys again are sorted by a
network of maxima and minima and merged into it, and the smaller half goes; so do, at last, the
lists of the sublanes. No step depends on what is compared, and nothing moves within a register.

The last of a list says which keys are best. Where too many keys have just that logit the first of
them are, found by bisection of their places. Then the places of the best pass by such lists.
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
LENGTH = 32  # of a list
KEYS = LENGTH * SUBLANES  # at a time
NOWHERE = 2.0**24  # beyond all places

Lists = Float[Array, "32 8 C"]
OfClusters = Float[Array, "8 C"]  # the same in all sublanes


def rows_of(x: Any, step: Any) -> Lists:
    """Those of a step's keys."""
    return x[pl.ds(step * KEYS, KEYS)].reshape(LENGTH, SUBLANES, -1)


def places_of(step: Any, lanes: int) -> Lists:
    """Of a step's keys."""
    row, sublane = (
        jax.lax.broadcasted_iota(jnp.int32, (LENGTH, SUBLANES, lanes), axis) for axis in (0, 1)
    )
    return (step * KEYS + row * SUBLANES + sublane).astype(jnp.float32)


def largest(steps: int, rows: Callable[[Any], Lists], lists: Any) -> Lists:
    """The 32 largest of each lane in order, the same in all sublanes.

    Args:
      rows: gives those of a step.
      lists: [256, C], float32, memory.
    """
    lists[...] = jnp.full(lists.shape, -jnp.inf)

    def some(step: Any, _: None) -> None:
        lists[...] = _merged(rows_of(lists, 0), _ordered(rows(step))).reshape(lists.shape)

    jax.lax.fori_loop(0, steps, some, None)
    results = rows_of(lists, 0)
    for shift in (4, 2, 1):
        results = _merged(results, pltpu.roll(results, shift, 1))
    return results


def threshold(
    logits: Any, values: Lists, counts: OfClusters, top_k: int
) -> tuple[OfClusters, OfClusters]:
    """What `is_best` compares with.

    Args:
      logits: [X, C].
      values: the largest of these.
      counts: of the members of clusters; what those without any choose means nothing.
    """
    least = jnp.maximum(values[top_k - 1], MASKED / 2)  # no key that is not there
    steps, lanes = logits.shape[0] // KEYS, logits.shape[1]

    def chosen(end: OfClusters) -> OfClusters:
        """How many would be."""

        def some(step: Any, count: Array) -> Array:
            best = is_best(rows_of(logits, step), places_of(step, lanes), least, end)
            return count + jnp.sum(jnp.where(best, 1.0, 0.0), axis=0)

        count = jax.lax.fori_loop(0, steps, some, jnp.zeros_like(least))
        return jnp.broadcast_to(jnp.sum(count, axis=0, keepdims=True), count.shape)

    all_of_them = jnp.full_like(least, NOWHERE)
    too_many = jnp.where((chosen(all_of_them) > top_k) & (counts > 0), 1.0, 0.0)
    bits = logits.shape[0].bit_length()

    def bisect(step: Any, end: OfClusters) -> OfClusters:
        further = end + (1 << (bits - 1 - step)).astype(jnp.float32)
        return jnp.where(chosen(further) > top_k, end, further)

    rounds = jnp.where(jnp.max(too_many) > 0, bits, 0)
    end = jax.lax.fori_loop(0, rounds, bisect, jnp.where(rounds > 0, 0.0, all_of_them))
    return least, end


def is_best(
    rows: Lists, places: Lists, least: OfClusters, end: OfClusters
) -> Bool[Array, "32 8 C"]:
    """Of keys with the least logit of the best, those before `end`."""
    return (rows > least[None]) | ((rows == least[None]) & (places < end[None]))


def _ordered(rows: Lists) -> Lists:
    """Batcher's odd-even merge sort, the largest first."""
    size = 1
    while size < LENGTH:
        apart = size
        while apart:
            blocks = rows.reshape(-1, 2 * size, *rows.shape[1:])
            edge = apart if apart < size else 0  # at both ends nothing is left to compare with
            inner = blocks[:, edge : 2 * size - edge]
            inner = _compared(inner.reshape(-1, *rows.shape[1:]), apart).reshape(inner.shape)
            parts = [blocks[:, :edge], inner, blocks[:, 2 * size - edge :]]
            rows = (jnp.concatenate(parts, axis=1) if edge else inner).reshape(rows.shape)
            apart //= 2
        size *= 2
    return rows


def _merged(a: Lists, b: Lists) -> Lists:
    """The larger half of two lists in order: a bitonic sequence, sorted by halves."""
    backwards = jnp.concatenate([b[i : i + 1] for i in reversed(range(LENGTH))], axis=0)
    rows, apart = jnp.maximum(a, backwards), LENGTH // 2
    while apart:
        rows = _compared(rows, apart)
        apart //= 2
    return rows


def _compared(rows: Float[Array, "N 8 C"], apart: int) -> Float[Array, "N 8 C"]:
    """Of rows so far apart the larger is the first."""
    pairs = rows.reshape(-1, 2, apart, *rows.shape[1:])
    a, b = pairs[:, :1], pairs[:, 1:]
    return jnp.concatenate([jnp.maximum(a, b), jnp.minimum(a, b)], axis=1).reshape(rows.shape)
