"""Memory attention (see `api.py`) in plain XLA, for a few queries at a time to limit the number of
scores.

There are two passes. The first pass searches and stores only the indices of the neighbours. The
second pass gathers the keys and values of the neighbours and attends to them. The gathered keys
take R times as much space as the queries, and so do the gathered values. They are therefore not
stored, and the backward pass gathers them again.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brt.memories.memorizing.memory_attention.retrieval import (
    Neighbors,
    Search,
    attend_to_neighbors,
    find_neighbors,
)
from brt.ops import dispatch
from brt.ops.gathering import take

# For a row of the batch, an array of scores, of retrieved keys or of retrieved values has at most
# this number of elements, which take 32 MiB in float32.
AT_ONCE = 2**23


def memory_attention(
    queries: Float[Array, "B T H K"],
    keys: Float[Array, "B H Z K"],
    values: Float[Array, "B H Z K"],
    counts: Int[Array, "B N"],
    *,
    window: int,
    size: int,
    neighbors: int,
    search: Search,
    null_keys: bool,
) -> Float[Array, "B T H K"]:
    """Computes `api.memory_attention` for blocks of `window` tokens; axis T as in `reference`."""
    by_head = queries.swapaxes(1, 2)
    # The neighbours have no gradient. A layer that is recomputed in the backward pass stores them;
    # otherwise it would store all scores, which are results of a product.
    found = _find_in_blocks(
        *jax.lax.stop_gradient((by_head, keys)), counts, window=window, size=size,
        neighbors=neighbors, search=search,
    )  # fmt: skip
    results = jax.tree.map(dispatch.input_residual, found)

    @jax.checkpoint
    def attend(q: Float[Array, "B H Q K"], results: Neighbors) -> Float[Array, "B H Q K"]:
        k, v = take(keys, results.indices), take(values, results.indices)
        return attend_to_neighbors(q, k, v, results.there, null_keys=null_keys)

    _, heads, tokens, width = by_head.shape
    rows = _rows(tokens, heads * neighbors * width)
    return _by_rows(attend, rows, by_head, results).swapaxes(1, 2)


def _find_in_blocks(
    queries: Float[Array, "B H T K"],
    keys: Float[Array, "B H Z K"],
    counts: Int[Array, "B N"],
    *,
    window: int,
    size: int,
    neighbors: int,
    search: Search,
) -> Neighbors:
    # The resulting indices refer to `keys`.
    batch, heads, tokens, width = queries.shape
    blocks = counts.shape[1]
    rows = _rows(tokens // blocks, heads * size)

    def search_block(n: Array, q: Float[Array, "B H Q K"], count: Int[Array, " B"]) -> Neighbors:
        seen = jax.lax.dynamic_slice_in_dim(keys, n * window, size, axis=2)

        def search_rows(q: Float[Array, "B H Q K"]) -> Neighbors:
            return find_neighbors(q, seen, count, neighbors=neighbors, search=search)

        results = _by_rows(search_rows, rows, q)
        return results._replace(indices=results.indices + n * window)

    split = jnp.moveaxis(queries.reshape(batch, heads, blocks, -1, width), 2, 0)
    results = jax.lax.map(lambda block: search_block(*block), (jnp.arange(blocks), split, counts.T))
    return jax.tree.map(
        lambda x: jnp.moveaxis(x, 0, 2).reshape(batch, heads, tokens, neighbors), results
    )


def _rows(queries: int, each: int) -> int:
    # Returns the number of queries to process at once: the largest divisor of `queries` for which
    # arrays with `each` elements per query have at most `AT_ONCE` elements, or 1.
    most = min(queries, max(AT_ONCE // each, 1))
    return next(rows for rows in range(most, 0, -1) if queries % rows == 0)


def _by_rows(function: Callable[..., Any], rows: int, *arrays: Any) -> Any:
    # Applies the function to arrays [B, H, Q, ...], `rows` queries (axis 2) at a time.
    def cut(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(*x.shape[:2], -1, rows, *x.shape[3:]), 2, 0)

    def joined(x: Array) -> Array:
        x = jnp.moveaxis(x, 0, 2)
        return x.reshape(*x.shape[:2], -1, *x.shape[4:])

    results = jax.lax.map(lambda part: function(*part), jax.tree.map(cut, arrays))
    return jax.tree.map(joined, results)
