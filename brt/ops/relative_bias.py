"""T5's relative position bias in both directions (Raffel et al. 2020).

The bias depends only on the offset, the key's position minus the query's. It is looked up once for
each offset, and each row of a tile (Q consecutive queries, S consecutive keys) is a slice of these
biases. The gradient is therefore a sum, not a scatter of Q x S entries.

In shapes, R is the number of buckets (`positions.t5_buckets`) and O of offsets.
"""

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from brt.ops.positions import t5_buckets

_BLOCK = 128  # the queries and keys of a block of a large tile


def relative_buckets(
    offsets: np.ndarray, *, buckets: int, max_distance: int, both_ways: bool
) -> np.ndarray:
    """Returns the index of each offset's bucket, int32.

    If `both_ways`, the upper half of the buckets is for keys after the query, and each half shares
    its last bucket from `max_distance` on. Otherwise, all keys after the query have the bucket of
    offset 0.
    """
    if not both_ways:
        return t5_buckets(-offsets, buckets=buckets, max_distance=max_distance)
    half = buckets // 2
    near = t5_buckets(np.abs(offsets), buckets=half, max_distance=max_distance)
    return np.where(offsets > 0, half + near, near).astype(np.int32)


def offset_bias(
    table: Float[Array, "R H"], offsets: np.ndarray, *, max_distance: int, both_ways: bool
) -> Float[Array, "H *N O"]:
    """Returns the bias of each head for each of O offsets, or of N rows of O offsets.

    The buckets are those of `relative_buckets`.
    """
    rows = relative_buckets(
        offsets, buckets=table.shape[0], max_distance=max_distance, both_ways=both_ways
    )
    return jnp.moveaxis(jnp.take(table, rows, axis=0), -1, 0)


def bias_tile(
    table: Float[Array, "R H"],
    queries: int,
    keys: int,
    *,
    first: int = 0,
    max_distance: int,
    both_ways: bool,
) -> Float[Array, "H Q S"]:
    """Returns the bias between each of Q consecutive queries and each of S consecutive keys.

    `first` is the position of key 0 minus the position of query 0.
    """
    bias = partial(offset_bias, table, max_distance=max_distance, both_ways=both_ways)
    if queries % _BLOCK or keys % _BLOCK or queries == _BLOCK:
        return _shifted_rows(lambda offsets: bias(offsets + first), queries, keys)
    # All blocks of _BLOCK queries and keys on one diagonal are equal, so each is computed once.
    rows, columns = queries // _BLOCK, keys // _BLOCK
    starts = first + _BLOCK * np.arange(1 - rows, columns)
    blocks = _shifted_rows(lambda offsets: bias(starts[:, None] + offsets), _BLOCK, _BLOCK)
    of_row = [blocks[:, rows - 1 - i : rows - 1 - i + columns] for i in range(rows)]
    # The axes of the stack are [H, rows, columns, queries of a block, keys of a block].
    return jnp.stack(of_row, axis=1).swapaxes(2, 3).reshape(-1, queries, keys)


def _shifted_rows(
    bias: Callable[[np.ndarray], Float[Array, "H *N O"]], queries: int, keys: int
) -> Float[Array, "H *N Q S"]:
    """Returns the tile that has, for query i and key j, the `bias` of the offset j - i."""
    period = queries + keys
    # The entry of `offsets` at index (j - i) mod `period` is the offset j - i of key j and query i.
    # One entry of `offsets` belongs to no pair of key and query and is never read.
    row = bias((np.arange(period) + queries) % period - queries)
    # `row` is repeated and then cut into one line for each query. The lines are one entry shorter
    # than `row`, so line i + 1 begins one entry earlier in `row` than line i. This is correct,
    # because the offset of a key is one smaller for query i + 1 than for query i.
    lines = jnp.tile(row, queries)[..., : queries * (period - 1)]
    return lines.reshape(*row.shape[:-1], queries, period - 1)[..., :keys]


def bias_row(
    table: Float[Array, "R H"], query: Int[Array, ""], keys: int, *, max_distance: int
) -> Float[Array, "H 1 S"]:
    """Returns the causal bias between one query, known at run time, and the keys 0 to S - 1."""
    row = offset_bias(table, -np.arange(keys), max_distance=max_distance, both_ways=False)
    return jnp.take(row, jnp.clip(query - jnp.arange(keys), 0, keys - 1), axis=1)[:, None]
