"""A memory of constant size for keys that queries no longer read individually.

A block is added to the memory when the next block ends. Each centroid then chooses among the keys
of the block and the keys that it has kept so far, and keeps the keys with the largest logits. The
values of all other keys are added to a weighted sum. This sum is the output of the centroid's own
attention to these keys. Nothing is ever removed from the sum, so every key counts exactly once.

In shapes, Q is the number of queries, C the number of centroids of a head, R the number of a
centroid's slots (places for keys), W the number of tokens of a block, and M = R + W the number of
keys from which a centroid chooses.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.ops.normalization import half_squares
from brt.ops.partial_attention import AttentionPart
from brt.ops.products import einsum
from brt.ops.softmax import FLOOR, MASKED
from brt.ops.top_k import largest, take


class Centroids(NamedTuple):
    """The float32 centroids to which the queries of each head are assigned."""

    vectors: Float[Array, "H C K"]  # including any scale by which queries are multiplied
    # The variance of the queries around their centroid, averaged over the K numbers of a query;
    # zero means that all queries of a centroid are treated as equal to the centroid.
    variances: Float[Array, "H C"]


class CentroidMemory(NamedTuple):
    """The keys and values that each centroid keeps or summarizes of a document.

    The memory that a block reads covers all blocks before the previous one.
    """

    # The R keys with the largest logits for the centroid, in descending order of the logits. If
    # there are fewer keys, the slots without a key are zeros.
    keys: Float[Array, "B H C R K"]
    values: Float[Array, "B H C R K"]
    # The centroid's float32 attention output over all keys that it does not keep. The logit of such
    # a key k for a centroid c with the variance v is c.k + v |k|^2 / 2.
    rest: Float[Array, "B H C K"]
    lse: Float[Array, "B H C"]  # the float32 log-sum-exp of the logits of these other keys
    # The number of slots that hold a key, for each row of the batch. If it is 0, the other arrays
    # have no meaning for this row.
    filled: Int[Array, " B"]


class FarInputs(NamedTuple):
    """The arrays of `api.causal_clustered_attention`, which describes them."""

    queries: Float[Array, "B T H K"]
    window: AttentionPart
    keys: Float[Array, "B Z H K"]
    values: Float[Array, "B Z H K"]
    cache_mask: Bool[Array, "B N"]
    pasts: CentroidMemory
    centroids: Centroids
    bias: Float[Array, " H"]

    @property
    def blocks(self) -> int:
        return self.cache_mask.shape[1]


def nearest_centroids(
    queries: Float[Array, "B H Q K"], centroids: Centroids
) -> Int[Array, "B H Q"]:
    """Returns the centroid with the smallest distance to each (scaled) query."""
    queries, vectors = jax.lax.stop_gradient((queries, centroids.vectors))
    products = einsum("bhqk,hck->bhqc", queries, vectors.astype(queries.dtype))
    squares = jnp.sum(vectors**2, axis=-1)[None, :, None]
    return jnp.argmax(products - squares / 2, axis=-1).astype(jnp.int32)


def empty_memory_unless(memory: CentroidMemory, keep: Bool[Array, " B"]) -> CentroidMemory:
    """Returns the memory, emptied in the rows of the batch where `keep` is False or `filled` is 0.

    In an emptied row, all keys and values are zeros, and the log-sum-exps are so small that `rest`
    has no weight.
    """
    keep = keep & (memory.filled > 0)

    memory = jax.tree.map(lambda x: jnp.where(keep.reshape(-1, *[1] * (x.ndim - 1)), x, 0), memory)
    return memory._replace(lse=jnp.where(keep[:, None, None], memory.lse, FLOOR))


def slot_mask(past: CentroidMemory) -> Bool[Array, "B R"]:
    return jnp.arange(past.keys.shape[3])[None] < past.filled[:, None]


def memory_after(
    past: CentroidMemory,
    keys: Float[Array, "B H W K"],
    values: Float[Array, "B H W K"],
    cache_mask: Bool[Array, " B"],
    centroids: Centroids,
) -> CentroidMemory:
    """Returns the memory after a block is added to it.

    Each centroid keeps the keys with the largest logits, and the other keys join the rest. Where a
    document begins after the added block, `cache_mask` is False, and the result is an empty memory.
    """
    past = empty_memory_unless(past, cache_mask)
    slots, width = past.keys.shape[3], keys.shape[2]
    vectors = centroids.vectors.astype(keys.dtype)
    logits = jnp.concatenate(
        [
            einsum("hck,bhcrk->bhcr", vectors, past.keys),
            einsum("hck,bhsk->bhcs", vectors, keys),
        ],
        axis=-1,
    )
    taken = jnp.broadcast_to(cache_mask[:, None], (cache_mask.shape[0], width))
    there = jnp.concatenate([slot_mask(past), taken], axis=1)[:, None, None]
    _, indices, best = largest(logits, there, slots)
    squares = jnp.concatenate([half_squares(past.keys), _new_half_squares(past, keys)], axis=-1)
    expected = logits + centroids.variances[None, :, :, None] * squares
    expected = jnp.where(there & ~best, expected, MASKED)
    rest, lse = _add_to_rest(past, values, expected)
    filled = jnp.minimum(past.filled + width * cache_mask, slots)
    there = (jnp.arange(slots)[None] < filled[:, None])[:, None, None, :, None]
    keys, values = (
        jnp.where(there, _take_old_or_new(old, new, indices), 0)
        for old, new in ((past.keys, keys), (past.values, values))
    )
    return CentroidMemory(keys, values, rest, lse, filled)


def _add_to_rest(
    past: CentroidMemory, values: Float[Array, "B H W K"], expected: Float[Array, "B H C M"]
) -> tuple[Float[Array, "B H C K"], Float[Array, "B H C"]]:
    """Returns `rest` and `lse` of the memory after keys with the logits `expected` are added."""
    slots, dtype = past.keys.shape[3], values.dtype
    # The old `rest` counts as the value of one key whose logit is the old `lse`.
    logits = jnp.concatenate([expected, past.lse[..., None]], axis=-1)
    lse = jax.nn.logsumexp(logits, axis=-1)
    weights = jnp.exp(logits - lse[..., None])
    old, new = weights[..., :slots].astype(dtype), weights[..., slots:-1].astype(dtype)
    rest = einsum("bhcr,bhcrk->bhck", old, past.values)
    rest += einsum("bhcs,bhsk->bhck", new, values)
    return rest + weights[..., -1:] * past.rest, lse


def _take_old_or_new(
    old: Float[Array, "B H C R K"],
    new: Float[Array, "B H W K"],
    indices: Int[Array, "B H C R"],
) -> Float[Array, "B H C R K"]:
    """Returns the vectors at `indices` of a list: a centroid's R old ones, then the W new ones."""
    slots = old.shape[3]
    old_vectors = jnp.take_along_axis(old, jnp.minimum(indices, slots - 1)[..., None], axis=3)
    new_vectors = take(new, jnp.maximum(indices - slots, 0))
    return jnp.where((indices < slots)[..., None], old_vectors, new_vectors)


def _new_half_squares(
    past: CentroidMemory, keys: Float[Array, "B H W K"]
) -> Float[Array, "B H C W"]:
    squares = half_squares(keys)[:, :, None]
    return jnp.broadcast_to(squares, (*past.lse.shape, keys.shape[2]))
