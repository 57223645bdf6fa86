"""T5's relative position bias in both directions (Raffel et al. 2020), as tiles of logits.

A tile has the bias between Q queries and S keys, which depends only on the offset, the key's
position minus the query's position. The bias of each offset is looked up once, and the tile is cut
from the row of these biases. The gradient is therefore a sum, not a scatter of Q x S entries.

In shapes, R is the number of buckets of distances, H of heads, Q of queries, S of keys and O of
offsets.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from brt.ops.positions import t5_buckets


def relative_buckets(
    offsets: np.ndarray, *, buckets: int, max_distance: int, both_ways: bool
) -> np.ndarray:
    """Returns the bucket of each offset, int32.

    The buckets have the same ranges of distances as in `positions.t5_buckets`.

    Args:
      offsets: positions of keys minus positions of queries, of any shape.
      buckets: the number of buckets.
      max_distance: the distance from which on all keys share a bucket.
      both_ways: True reserves the upper half of the buckets for keys after the query. False gives
        all keys after the query the bucket of offset 0.
    """
    if not both_ways:
        return t5_buckets(-offsets, buckets=buckets, max_distance=max_distance)
    half = buckets // 2
    near = t5_buckets(np.abs(offsets), buckets=half, max_distance=max_distance)
    return np.where(offsets > 0, half + near, near).astype(np.int32)


def offset_bias(
    table: Float[Array, "R H"], offsets: np.ndarray, *, max_distance: int, both_ways: bool
) -> Float[Array, "H O"]:
    """Returns the bias of each head for each of the O offsets (key minus query).

    Args:
      table: the bias of each bucket and head.
      offsets, max_distance, both_ways: as for `relative_buckets`.
    """
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
    """Returns the bias between each query and each key of a tile.

    Args:
      table: the bias of each bucket and head.
      queries: the number of queries.
      keys: the number of keys.
      first: position of key 0 minus position of query 0.
      max_distance: the distance from which on all keys share a bucket.
      both_ways: True if keys before and after the query have different buckets; see
        `relative_buckets`.
    """
    period = queries + keys
    # For key j and query i, the entry of `offsets` at index (j - i) mod `period` is j - i. One
    # entry of `offsets` belongs to no pair of key and query and is never read.
    offsets = (np.arange(period) + queries) % period - queries
    row = offset_bias(table, offsets + first, max_distance=max_distance, both_ways=both_ways)
    # The repeated `row` is cut into lines that are one entry shorter than `period`. Each line
    # therefore begins one entry earlier in `row` than the line before, as the offsets require.
    lines = jnp.tile(row, (1, queries))[:, : queries * (period - 1)]
    return lines.reshape(-1, queries, period - 1)[:, :, :keys]


def bias_row(
    table: Float[Array, "R H"], query: Int[Array, ""], keys: int, *, max_distance: int
) -> Float[Array, "H 1 S"]:
    """Returns the causal bias between one query and the keys from position 0 on.

    Keys after the query have the bias of the query itself.

    Args:
      table: the bias of each bucket and head.
      query: the position of the query, known only at run time.
      keys: the number of keys.
      max_distance: the distance from which on all keys share a bucket.
    """
    row = offset_bias(table, -np.arange(keys), max_distance=max_distance, both_ways=False)
    return jnp.take(row, jnp.clip(query - jnp.arange(keys), 0, keys - 1), axis=1)[:, None]
