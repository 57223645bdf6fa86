"""Causal clustered attention in float32, with each block's memory computed from all keys before it.

In shapes, M is the number of keys from which a centroid chooses; see `api` for the other axes.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from brt.ops.causal_clustered_attention.centroid_memory import (
    CentroidMemory,
    Centroids,
    FarInputs,
)
from brt.ops.partial_attention import AttentionPart
from brt.ops.softmax import FLOOR


def memory_scan(
    keys: Float[Array, "B Z H K"],
    values: Float[Array, "B Z H K"],
    cache_mask: Bool[Array, "B N"],
    past: CentroidMemory,
    centroids: Centroids,
) -> tuple[CentroidMemory, CentroidMemory]:
    k, v = (x.astype(jnp.float32).swapaxes(1, 2) for x in (keys, values))
    results = [
        _memory_of_block(k, v, cache_mask, past, centroids, block)
        for block in range(cache_mask.shape[1] + 1)
    ]
    results = [
        past._replace(keys=past.keys.astype(keys.dtype), values=past.values.astype(values.dtype))
        for past in results
    ]
    return results[-1], jax.tree.map(lambda *leaves: jnp.stack(leaves), *results[:-1])


def attend(inputs: FarInputs, *, attend_to_self: bool) -> Float[Array, "B T H K"]:
    """Implements `api.causal_clustered_attention`."""
    queries, window, keys, values, cache_mask, pasts, centroids, bias = inputs
    blocks = inputs.blocks
    width = queries.shape[1] // blocks
    left = np.tri(width, k=0 if attend_to_self else -1, dtype=bool)[None]
    outputs = []
    for n in range(blocks):
        # `rows` selects block n of the queries. The keys begin with the cached block, so `rows`
        # selects block n - 1 of the keys.
        rows = slice(n * width, (n + 1) * width)
        q, k, v = (x[:, rows].astype(jnp.float32).swapaxes(1, 2) for x in (queries, keys, values))
        part = AttentionPart(*(x[:, rows].astype(jnp.float32).swapaxes(1, 2) for x in window))
        mask = left & cache_mask[:, n, None, None]
        past = jax.tree.map(lambda leaf, n=n: leaf[n], pasts)
        outputs.append(_attend(q, part, k, v, mask, past, centroids, bias))
    y = jnp.concatenate(outputs, axis=2)
    return y.swapaxes(1, 2).astype(values.dtype)


def _memory_of_block(
    keys: Float[Array, "B H Z K"],
    values: Float[Array, "B H Z K"],
    cache_mask: Bool[Array, "B N"],
    past: CentroidMemory,
    centroids: Centroids,
    block: int,
) -> CentroidMemory:
    """Returns the memory that block `block` of the segment reads.

    The memory is computed from `past` and the first `block` blocks of `keys`. As `keys` begin with
    the cached block, the block right before block `block` is not among these blocks.
    """
    blocks, slots = cache_mask.shape[1], past.keys.shape[3]
    width = keys.shape[2] // (blocks + 1)
    linked = cache_mask[:, : block + 1]
    same = jnp.stack([jnp.all(linked[:, i:], axis=1) for i in range(max(block, 1))], axis=1)
    known = same[:, :1] & (jnp.arange(slots)[None] < past.filled[:, None])
    there = jnp.concatenate([known, jnp.repeat(same[:, :block], width, axis=1)], axis=1)
    there = there[:, None, None]

    # Each centroid chooses among the keys that it has in `past` and the keys of the first `block`
    # blocks. Only the keys of the blocks are the same for all centroids.
    def with_new(past_part: Array, new_part: Array) -> Float[Array, "B H C M K"]:
        since = new_part[:, :, None, : block * width]
        since = jnp.broadcast_to(since, (*past_part.shape[:3], *since.shape[3:]))
        return jnp.concatenate([past_part.astype(jnp.float32), since], axis=3)

    all_keys, all_values = with_new(past.keys, keys), with_new(past.values, values)
    logits = jnp.einsum("hck,bhcmk->bhcm", centroids.vectors, all_keys)
    order = jnp.argsort(jnp.where(there, -jax.lax.stop_gradient(logits), jnp.inf), axis=-1)
    others = there & (jnp.argsort(order, axis=-1) >= slots)
    jensen = centroids.variances[None, :, :, None] * jnp.sum(all_keys**2, axis=-1) / 2
    empty = ~same[:, :1] | (past.filled == 0)[:, None]
    before = jnp.where(empty[..., None], FLOOR, past.lse)[..., None]
    expected = jnp.concatenate([jnp.where(others, logits + jensen, -jnp.inf), before], axis=-1)
    rest_before = jnp.where(empty[..., None, None], 0, past.rest)[:, :, :, None]
    rest = jnp.einsum(
        "bhcm,bhcmk->bhck", jax.nn.softmax(expected, axis=-1),
        jnp.concatenate([all_values, rest_before], axis=3),
    )  # fmt: skip
    filled = jnp.minimum(jnp.sum(there[:, 0, 0], axis=-1, dtype=jnp.int32), slots)
    best = order[..., :slots, None]
    is_key = (jnp.arange(slots)[None] < filled[:, None])[:, None, None, :, None]
    kept_keys, kept_values = (
        jnp.where(is_key, jnp.take_along_axis(x, best, axis=3), 0) for x in (all_keys, all_values)
    )
    return CentroidMemory(kept_keys, kept_values, rest, jax.nn.logsumexp(expected, axis=-1), filled)


def _attend(
    queries: Float[Array, "B H W K"],
    window: AttentionPart,
    keys: Float[Array, "B H W K"],
    values: Float[Array, "B H W K"],
    mask: Bool[Array, "B W W"],
    past: CentroidMemory,
    centroids: Centroids,
    bias: Float[Array, " H"],
) -> Float[Array, "B H W K"]:
    """Returns the output of one softmax over the window, keys that have left it, and the memory.

    `window` is the attention to the window. `keys` and `values` are those of the previous block,
    and `mask` is True for keys that have left the window of a query. `past` is the memory of all
    centroids, and a query reads the memory of the nearest centroid. `bias` is added to the logits
    of these keys and of all keys in the memory.
    """
    away = queries[:, :, :, None] - centroids.vectors[None, :, None]
    label = jnp.argmin(jnp.sum(jax.lax.stop_gradient(away) ** 2, axis=-1), axis=-1)

    def take_centroid(x: Array) -> Array:
        return jnp.take_along_axis(x, label.reshape(*label.shape, *[1] * (x.ndim - 3)), axis=2)

    best_keys, best_values = take_centroid(past.keys), take_centroid(past.values)
    rest, total = take_centroid(past.rest), take_centroid(past.lse)
    head_bias = bias[None, :, None, None]
    nearby = jnp.einsum("bhqk,bhsk->bhqs", queries, keys) + head_bias
    best = jnp.einsum("bhqk,bhqrk->bhqr", queries, best_keys) + head_bias
    there = jnp.arange(best.shape[-1])[None] < past.filled[:, None]
    # The window has one column, and so have the keys that the centroid does not keep.
    columns = [
        window.lse[..., None], jnp.where(mask[:, None], nearby, -jnp.inf),
        jnp.where(there[:, None, None], best, -jnp.inf), total[..., None] + head_bias,
    ]  # fmt: skip
    weights = jax.nn.softmax(jnp.concatenate(columns, axis=-1), axis=-1)
    sizes = np.cumsum([column.shape[-1] for column in columns[:-1]])
    window_weight, nearby_weights, best_weights, rest_weight = jnp.split(weights, sizes, axis=-1)
    y = window_weight * window.output + rest_weight * rest
    y += jnp.einsum("bhqs,bhsk->bhqk", nearby_weights, values)
    return y + jnp.einsum("bhqr,bhqrk->bhqk", best_weights, best_values)
