"""T5's relative position bias in both directions (Raffel et al. 2020), for whole tiles.

A tile's entries depend on key minus query alone: each distance is looked up once, and the
tile is cut from that row, so that its gradient is a sum instead of a scatter of Q x S.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from brt.ops.positions import t5_buckets


def relative_buckets(
    offsets: np.ndarray, *, buckets: int, max_distance: int, both_ways: bool
) -> np.ndarray:
    """Bucket of each offset (key minus query).

    Both ways: the lower half of the buckets is for keys up to the query, the upper half
    for keys after it. Otherwise keys after the query count as the query itself.
    """
    if not both_ways:
        return t5_buckets(-offsets, buckets=buckets, max_distance=max_distance)
    half = buckets // 2
    near = t5_buckets(np.abs(offsets), buckets=half, max_distance=max_distance)
    return np.where(offsets > 0, half + near, near).astype(np.int32)


def offset_bias(
    table: Float[Array, "R H"], offsets: np.ndarray, *, max_distance: int, both_ways: bool
) -> Float[Array, "H O"]:
    """The bias of each offset in a 1-d array of them."""
    rows = relative_buckets(
        offsets, buckets=table.shape[0], max_distance=max_distance, both_ways=both_ways
    )
    return jnp.take(table, rows, axis=0).T


def bias_tile(
    table: Float[Array, "R H"],
    queries: int,
    keys: int,
    *,
    first: int = 0,
    max_distance: int,
    both_ways: bool,
) -> Float[Array, "H Q S"]:
    """The bias of query i and key j, of which key 0 lies `first` after query 0."""
    period = queries + keys
    # Entry (j - i) mod period; one entry, for no j - i at all, is never read.
    offsets = (np.arange(period) + queries) % period - queries
    row = offset_bias(table, offsets + first, max_distance=max_distance, both_ways=both_ways)
    # A row repeated with its period and cut one short of it shifts by one a line.
    lines = jnp.tile(row, (1, queries))[:, : queries * (period - 1)]
    return lines.reshape(-1, queries, period - 1)[:, :, :keys]


def bias_row(
    table: Float[Array, "R H"], query: Int[Array, ""], keys: int, *, max_distance: int
) -> Float[Array, "H 1 S"]:
    """The bias of one query, at a position known only at run time, and the keys from 0 on.

    Causal: columns after the query have the bias of the query itself.
    """
    row = offset_bias(table, -np.arange(keys), max_distance=max_distance, both_ways=False)
    return jnp.take(row, jnp.clip(query - jnp.arange(keys), 0, keys - 1), axis=1)[:, None]
