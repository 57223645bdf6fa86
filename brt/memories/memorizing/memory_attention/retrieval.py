"""Search for the neighbours of a query, and attention to these neighbours.

There are two kinds of search:
  exact: the neighbours are the keys with the largest products with the query.
  bucketed: the tokens are distributed in turn to as many buckets as a query has neighbours. The
    neighbours are the best key of each bucket, as in the approximate search of the original code.

In shapes, M is the number of keys, Q of queries, and R of neighbours of a query. The other letters
of shapes are those of `brt.layers.state`.
"""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.ops.softmax import MASKED, safe_softmax
from brt.ops.top_k import top_k

Search = Literal["exact", "bucketed"]


class Neighbors(NamedTuple):
    """The neighbours of every query, in no particular order. `there` is False where a neighbour is
    missing, because there are fewer than R keys or a bucket is empty; its index has no meaning.
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
    """Returns the R = `neighbors` neighbours of every query among the last `count` of the M keys.

    The scores are the products of queries and keys; a positive scale of the queries has no
    influence. All [B, H, Q, M] scores are computed at once, so the caller limits Q.
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
    """Returns the attention output of every query, already scaled, over its R neighbours. With
    `null_keys`, missing neighbours count as zero keys with zero values instead of being ignored.
    """
    logits = jnp.einsum("bhqk,bhqrk->bhqr", queries, keys, preferred_element_type=jnp.float32)
    weights = safe_softmax(jnp.where(there, logits, 0.0 if null_keys else MASKED))
    weights = jnp.where(there, weights, 0).astype(values.dtype)
    return jnp.einsum("bhqr,bhqrk->bhqk", weights, values)
