"""The keys that centroids attend to most, on TPUs: sorted lists that all keys pass by.

Clusters fill the lanes and keys go down. Each sublane has a list of the largest logits of the keys
it has seen, in order, a register for each place of the list. As many keys again are sorted by a
network of maxima and minima and merged into it, and the smaller half goes; so do, at last, the
lists of the sublanes. No step depends on what is compared, and nothing moves within a register.

The last of a list says which keys are best. Where too many keys have just that logit the first of
them are, found by bisection of their places. Then the places of the best pass by such lists.
"""

from collections.abc import Callable, Iterator
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

Rows = list[Float[Array, "8 C"]]


def rows_of(x: Any, step: Any) -> Rows:
    """The registers of a step's keys."""
    return [x[pl.ds(step * KEYS + j, SUBLANES)] for j in range(0, KEYS, SUBLANES)]


def places_of(step: Any, lanes: int) -> Rows:
    """Float32, of a step's keys."""
    first = jax.lax.broadcasted_iota(jnp.int32, (SUBLANES, lanes), 0) + step * KEYS
    return [(first + j).astype(jnp.float32) for j in range(0, KEYS, SUBLANES)]


def largest(steps: int, rows: Callable[[Any], Rows], lists: Any) -> Rows:
    """The 32 largest of each lane in order, the same in all sublanes.

    Args:
      rows: gives those of a step.
      lists: [256, C], float32, memory.
    """
    lists[...] = jnp.full(lists.shape, -jnp.inf)

    def some(step: Any, _: None) -> None:
        for j, row in enumerate(_merged(rows_of(lists, 0), _ordered(rows(step)))):
            lists[j * SUBLANES : (j + 1) * SUBLANES] = row

    jax.lax.fori_loop(0, steps, some, None)
    found = rows_of(lists, 0)
    for shift in (4, 2, 1):
        found = _merged(found, [pltpu.roll(row, shift, 0) for row in found])
    return found


def threshold(
    logits: Any, values: Rows, counts: Float[Array, "8 C"], top_k: int
) -> tuple[Float[Array, "8 C"], Float[Array, "8 C"]]:
    """What `is_best` compares with.

    Args:
      logits: [X, C].
      values: the largest of these.
      counts: of the members of clusters; what those without any choose means nothing.
    """
    least = jnp.maximum(values[top_k - 1], MASKED / 2)  # no key that is not there
    steps, lanes = logits.shape[0] // KEYS, logits.shape[1]

    def chosen(end: Float[Array, "8 C"]) -> Float[Array, "8 C"]:
        def some(step: Any, count: Array) -> Array:
            for row, place in zip(rows_of(logits, step), places_of(step, lanes), strict=True):
                count += jnp.where(is_best(row, place, least, end), 1.0, 0.0)
            return count

        count = jax.lax.fori_loop(0, steps, some, jnp.zeros_like(least))
        return jnp.broadcast_to(jnp.sum(count, axis=0, keepdims=True), count.shape)

    all_of_them = jnp.full_like(least, NOWHERE)
    too_many = jnp.where((chosen(all_of_them) > top_k) & (counts > 0), 1.0, 0.0)
    bits = logits.shape[0].bit_length()

    def bisect(step: Any, end: Float[Array, "8 C"]) -> Float[Array, "8 C"]:
        further = end + (1 << (bits - 1 - step)).astype(jnp.float32)
        return jnp.where(chosen(further) > top_k, end, further)

    rounds = jnp.where(jnp.max(too_many) > 0, bits, 0)
    end = jax.lax.fori_loop(0, rounds, bisect, jnp.where(rounds > 0, 0.0, all_of_them))
    return least, end


def is_best(row: Array, place: Array, least: Array, end: Array) -> Bool[Array, "8 C"]:
    """Of keys with the least logit of the best, those before `end`."""
    return (row > least) | ((row == least) & (place < end))


def _ordered(rows: Rows) -> Rows:
    """Batcher's odd-even merge sort, the largest first."""
    rows = list(rows)
    for i, j in _comparators(len(rows)):
        rows[i], rows[j] = jnp.maximum(rows[i], rows[j]), jnp.minimum(rows[i], rows[j])
    return rows


def _comparators(count: int) -> Iterator[tuple[int, int]]:
    size = 1
    while size < count:
        apart = size
        while apart:
            for begin in range(apart % size, count - apart, 2 * apart):
                for i in range(begin, min(begin + apart, count - apart)):
                    if i // (2 * size) == (i + apart) // (2 * size):
                        yield i, i + apart
            apart //= 2
        size *= 2


def _merged(a: Rows, b: Rows) -> Rows:
    """The larger half of two lists in order: its bitonic sequence is sorted by halves."""
    rows = [jnp.maximum(x, y) for x, y in zip(a, reversed(b), strict=True)]
    apart = len(rows) // 2
    while apart:
        for i in (i for i in range(len(rows)) if not i & apart):
            j = i + apart
            rows[i], rows[j] = jnp.maximum(rows[i], rows[j]), jnp.minimum(rows[i], rows[j])
        apart //= 2
    return rows
