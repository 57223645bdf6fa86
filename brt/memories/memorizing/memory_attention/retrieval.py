"""Search for the neighbours of a query, and attention to these neighbours.

There are two kinds of search:
  exact: the neighbours are the keys with the largest products with the query.
  bucketed: the tokens are distributed in turn to as many buckets as a query has neighbours. The
    neighbours are the best key of each bucket, as in the approximate search of the original code.

In shapes, B is the number of rows of the batch, H of heads, K of numbers of a head, M of keys, Q of
queries, and R of neighbours of a query.
"""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.ops.softmax import MASKED, safe_softmax
from brt.ops.top_k import top_k

Search = Literal["exact", "bucketed"]


class Neighbors(NamedTuple):
    """The neighbours of every query, in no particular order.

    Attributes:
      indices: int32 [B, H, Q, R], the indices of the neighbours' keys.
      there: bool [B, H, Q, R], False where a neighbour is missing, because there are fewer than R
        keys or a bucket is empty. The index then has no meaning.
    """

    indices: Int[Array, "B H Q R"]
    there: Bool[Array, "B H Q R"]


def find_neighbors(
    queries: Float[Array, "B H Q K"],
    keys: Float[Array, "B H M K"],
    count: Int[Array, " B"],
    *,
    neighbors: int,
    search: Search,
) -> Neighbors:
    """Returns the R = `neighbors` neighbours of every query among the last `count` keys.

    The scores are the products of queries and keys. All [B, H, Q, M] scores are computed at once,
    so the caller limits Q.

    Args:
      queries: the queries, which may already be scaled; a positive scale has no influence.
      keys: the keys of the memory, oldest first.
      count: for each row of the batch, the number of keys that may be neighbours: the last `count`
        of the M keys.
      neighbors: R, the number of neighbours of a query.
      search: "exact" or "bucketed"; "bucketed" needs M to be a multiple of R.
    """
    scores = jnp.einsum("bhqk,bhmk->bhqm", queries, keys, preferred_element_type=jnp.float32)
    size = keys.shape[2]
    mask = jnp.arange(size)[None] >= size - count[:, None]
    scores = jnp.where(mask[:, None, None], scores, -jnp.inf)
    best, indices = (top_k if search == "exact" else _top_of_buckets)(scores, neighbors)
    return Neighbors(indices, best > -jnp.inf)


def _top_of_buckets(scores: Float[Array, "B H Q M"], buckets: int) -> tuple[Array, Array]:
    by_bucket = scores.reshape(*scores.shape[:3], -1, buckets)
    place = jnp.argmax(by_bucket, axis=3).astype(jnp.int32)
    return jnp.max(by_bucket, axis=3), place * buckets + jnp.arange(buckets)[None, None, None]


def attend_to_neighbors(
    queries: Float[Array, "B H Q K"],
    keys: Float[Array, "B H Q R K"],
    values: Float[Array, "B H Q R K"],
    there: Bool[Array, "B H Q R"],
    *,
    null_keys: bool,
) -> Float[Array, "B H Q K"]:
    """Returns the attention output of every query over its R neighbours, in the dtype of `values`.

    Args:
      queries: the queries, already scaled; the function applies no scale.
      keys, values: the keys and values of each query's neighbours.
      there: False for missing neighbours.
      null_keys: True makes missing neighbours count as zero keys with zero values instead of being
        ignored.
    """
    logits = jnp.einsum("bhqk,bhqrk->bhqr", queries, keys, preferred_element_type=jnp.float32)
    weights = safe_softmax(jnp.where(there, logits, 0.0 if null_keys else MASKED))
    weights = jnp.where(there, weights, 0).astype(values.dtype)
    return jnp.einsum("bhqr,bhqrk->bhqk", weights, values)
