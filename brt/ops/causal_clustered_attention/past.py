"""What is kept of keys that no query reads by itself any more: a state of constant size.

A block is taken in when the block after it ends. A centroid looks at its keys once: the few
with the largest logits among these and the ones it has are kept, all others are summed up as
the centroid reads them. Nothing is subtracted or looked at again, so no key is lost, and none
counts twice.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.ops.memory_attention.retrieval import take
from brt.ops.softmax import FLOOR, MASKED
from brt.ops.top_k import top_k


class Centroids(NamedTuple):
    """What the queries of a head are shared out to, C of them; float32.

    Attributes:
      vectors: [H, C, K], in the space of the queries, with any scale folded in.
      variances: [H, C], of a centroid's queries around it, averaged over the K numbers; of
        zero where queries are taken for their centroid.
    """

    vectors: Float[Array, "H C K"]
    variances: Float[Array, "H C"]


class Past(NamedTuple):
    """What every centroid has of all blocks of a document before the last one.

    Attributes:
      keys: [B, H, C, R, K], those with the largest logits, largest first; zeros where there
        were fewer.
      values: [B, H, C, R, K].
      rest: float32 [B, H, C, K], what the centroid reads from all other keys.
      lse: float32 [B, H, C], the logarithm of the sum of their exp(logit).
      filled: int32 [B], how many of the R keys there are; the other arrays of a lane mean
        nothing where this is 0.
    """

    keys: Float[Array, "B H C R K"]
    values: Float[Array, "B H C R K"]
    rest: Float[Array, "B H C K"]
    lse: Float[Array, "B H C"]
    filled: Int[Array, " B"]


def nearest(queries: Float[Array, "B H Q K"], centroids: Centroids) -> Int[Array, "B H Q"]:
    """The centroid of every query: the one at the smallest distance; a constant."""
    queries, vectors = jax.lax.stop_gradient((queries, centroids.vectors))
    products = _product("bhqk,hck->bhqc", queries, vectors.astype(queries.dtype))
    squares = jnp.sum(vectors**2, axis=-1)[None, :, None]
    return jnp.argmax(products - squares / 2, axis=-1).astype(jnp.int32)


def kept(past: Past, lanes: Bool[Array, " B"]) -> Past:
    """The past of these lanes; the others, and those that have none, begin anew."""
    keep = lanes & (past.filled > 0)

    def emptied(x: Array) -> Array:
        return jnp.where(keep.reshape(-1, *[1] * (x.ndim - 1)), x, 0)

    past = jax.tree.map(emptied, past)
    return past._replace(lse=jnp.where(keep[:, None, None], past.lse, FLOOR))


def is_filled(past: Past) -> Bool[Array, "B R"]:
    """Which of the R keys there are."""
    return jnp.arange(past.keys.shape[3])[None] < past.filled[:, None]


def past_after(
    past: Past,
    keys: Float[Array, "B H W K"],
    values: Float[Array, "B H W K"],
    cache_mask: Bool[Array, " B"],
    centroids: Centroids,
) -> Past:
    """The past with one block more.

    Args:
      keys, values: of the block before the one that ends.
      cache_mask: whether the two are of one document; where not, the past begins anew.
    """
    past = kept(past, cache_mask)
    slots, width = past.keys.shape[3], keys.shape[2]
    vectors = centroids.vectors.astype(keys.dtype)
    logits = jnp.concatenate(
        [
            _product("hck,bhcrk->bhcr", vectors, past.keys),
            _product("hck,bhsk->bhcs", vectors, keys),
        ],
        axis=-1,
    )
    taken = jnp.broadcast_to(cache_mask[:, None], (cache_mask.shape[0], width))
    there = jnp.concatenate([is_filled(past), taken], axis=1)[:, None, None]
    indices, best = _best(logits, there, slots)
    spread = jnp.concatenate([_half_squares(past.keys), _new_half_squares(past, keys)], axis=-1)
    expected = logits + centroids.variances[None, :, :, None] * spread
    expected = jnp.where(there & ~best, expected, MASKED)
    rest, lse = _summed(past, values, expected)
    filled = jnp.minimum(past.filled + width * cache_mask, slots)
    there = (jnp.arange(slots)[None] < filled[:, None])[:, None, None, :, None]
    keys, values = (
        jnp.where(there, _chosen(old, new, indices), 0)
        for old, new in ((past.keys, keys), (past.values, values))
    )
    return Past(keys, values, rest, lse, filled)


def _best(
    logits: Float[Array, "B H C M"], there: Bool[Array, "B 1 1 M"], count: int
) -> tuple[Int[Array, "B H C R"], Bool[Array, "B H C M"]]:
    """The keys to keep, largest first, and where they are; of equal ones the first."""
    ranked = jnp.where(there, jax.lax.stop_gradient(logits), -jnp.inf)
    values, indices = top_k(ranked, count)
    last, place = values[..., -1:], jnp.arange(logits.shape[-1])[None, None, None]
    return indices, (ranked > last) | ((ranked == last) & (place <= indices[..., -1:]))


def _summed(
    past: Past, values: Float[Array, "B H W K"], expected: Float[Array, "B H C M"]
) -> tuple[Float[Array, "B H C K"], Float[Array, "B H C"]]:
    """What was summed up already as one key more, with its total for a logit."""
    slots, dtype = past.keys.shape[3], values.dtype
    logits = jnp.concatenate([expected, past.lse[..., None]], axis=-1)
    lse = jax.nn.logsumexp(logits, axis=-1)
    weights = jnp.exp(logits - lse[..., None])
    old, new = weights[..., :slots].astype(dtype), weights[..., slots:-1].astype(dtype)
    rest = _product("bhcr,bhcrk->bhck", old, past.values)
    rest += _product("bhcs,bhsk->bhck", new, values)
    return rest + weights[..., -1:] * past.rest, lse


def _chosen(
    old: Float[Array, "B H C R K"],
    new: Float[Array, "B H W K"],
    indices: Int[Array, "B H C R"],
) -> Float[Array, "B H C R K"]:
    """Of R vectors that a centroid has and W that all share."""
    slots = old.shape[3]
    of_old = jnp.take_along_axis(old, jnp.minimum(indices, slots - 1)[..., None], axis=3)
    of_new = take(new, jnp.maximum(indices - slots, 0))
    return jnp.where((indices < slots)[..., None], of_old, of_new)


def _half_squares(keys: Float[Array, "*B K"]) -> Float[Array, "*B"]:
    return jnp.sum(keys.astype(jnp.float32) ** 2, axis=-1) / 2


def _new_half_squares(past: Past, keys: Float[Array, "B H W K"]) -> Float[Array, "B H C W"]:
    squares = _half_squares(keys)[:, :, None]
    return jnp.broadcast_to(squares, (*past.lse.shape, keys.shape[2]))


def _product(spec: str, a: Array, b: Array) -> Array:
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)
