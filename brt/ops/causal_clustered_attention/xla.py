"""Causal clustered attention in plain XLA, for all blocks at once.

The tokens of a block are sorted by centroid, so that a centroid's keys are gathered once for
several of its queries. In shapes, Q is the number of queries of a block. In `_gather_by_tile`, N is
the number of tiles. `api` describes the other axes.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from brt.ops.causal_clustered_attention.centroid_memory import (
    CentroidMemory,
    Centroids,
    FarInputs,
    empty_memory_unless,
    memory_after,
    nearest_centroids,
    slot_mask,
)
from brt.ops.clustered_attention.members import (
    QueryTiles,
    build_tiles,
    from_tiles,
    gather_by_label,
    to_tiles,
)
from brt.ops.partial_attention import AttentionPart, attend_to_part, merge_parts
from brt.ops.products import einsum
from brt.ops.softmax import MASKED


def memory_scan(
    keys: Float[Array, "B Z H K"],
    values: Float[Array, "B Z H K"],
    cache_mask: Bool[Array, "B N"],
    past: CentroidMemory,
    centroids: Centroids,
) -> tuple[CentroidMemory, CentroidMemory]:
    def add_block(
        past: CentroidMemory, block: tuple[Array, Array, Bool[Array, " B"]]
    ) -> tuple[CentroidMemory, CentroidMemory]:
        past = empty_memory_unless(past, block[2])
        return memory_after(past, *block, centroids), past

    return jax.lax.scan(add_block, past, (*previous_blocks(keys, values, cache_mask), cache_mask.T))


def attend(inputs: FarInputs, *, attend_to_self: bool) -> Float[Array, "B T H K"]:
    """Implements `api.causal_clustered_attention`."""
    blocks, cache_mask = inputs.blocks, inputs.cache_mask
    width = inputs.queries.shape[1] // blocks
    left = jnp.asarray(np.tri(width, k=0 if attend_to_self else -1, dtype=bool))

    def attend_one_block(
        queries: Float[Array, "B H W K"],
        window: AttentionPart,
        before: tuple[Array, Array],
        cache_mask: Bool[Array, " B"],
        past: CentroidMemory,
    ) -> Float[Array, "B H W K"]:
        mask = left[None] & cache_mask[:, None, None]
        return attend_block(queries, window, *before, mask, past, inputs.centroids, inputs.bias)

    parts = AttentionPart(*(split_blocks(x, blocks) for x in inputs.window))
    before = previous_blocks(inputs.keys, inputs.values, cache_mask)
    y = jax.vmap(attend_one_block)(
        split_blocks(inputs.queries, blocks), parts, before, cache_mask.T, inputs.pasts
    )
    return join_blocks(y)


def previous_blocks(
    keys: Float[Array, "B Z H K"], values: Float[Array, "B Z H K"], cache_mask: Bool[Array, "B N"]
) -> tuple[Float[Array, "N B H W K"], Float[Array, "N B H W K"]]:
    """Returns, for each block, the keys and values of the previous block.

    The previous block of the first block is the cached block.
    """
    blocks = cache_mask.shape[1]
    tokens = keys.shape[1] // (blocks + 1) * blocks
    return split_blocks(keys[:, :tokens], blocks), split_blocks(values[:, :tokens], blocks)


def split_blocks(x: Float[Array, "B T H *K"], blocks: int) -> Float[Array, "N B H W *K"]:
    """Returns x, split into N blocks, with the axis of heads before the axis of tokens."""
    cut = x.reshape(x.shape[0], blocks, -1, *x.shape[2:])
    return jnp.moveaxis(cut, (1, 3), (0, 2))


def join_blocks(x: Float[Array, "N B H W K"]) -> Float[Array, "B T H K"]:
    blocks, batch, heads, width, size = x.shape
    return x.transpose(1, 0, 3, 2, 4).reshape(batch, blocks * width, heads, size)


def attend_block(
    queries: Float[Array, "B H Q K"],
    window: AttentionPart,
    keys: Float[Array, "B H W K"],
    values: Float[Array, "B H W K"],
    mask: Bool[Array, "B Q W"],
    past: CentroidMemory,
    centroids: Centroids,
    bias: Float[Array, " H"],
) -> Float[Array, "B H Q K"]:
    """Returns the attention output of the queries of one block over all earlier tokens.

    The keys are those of the previous block. `mask` is True where a key has left a query's window
    and the query may read the key.
    """
    logits = einsum("bhqk,bhsk->bhqs", queries, keys) + bias[None, :, None, None]
    nearby = attend_to_part(jnp.where(mask[:, None], logits, MASKED), values)
    y = merge_parts([window, nearby, _attend_to_memory(queries, past, centroids, bias)])
    return y.output.astype(values.dtype)


def _attend_to_memory(
    queries: Float[Array, "B H Q K"],
    past: CentroidMemory,
    centroids: Centroids,
    bias: Float[Array, " H"],
) -> AttentionPart:
    clusters, tokens = past.keys.shape[2], queries.shape[2]
    size = max(tokens // (2 * clusters), 1)
    tiles = build_tiles(nearest_centroids(queries, centroids), clusters=clusters, size=size)
    keys, values, rest, lse = (_gather_by_tile(x, tiles) for x in past[:-1])
    head_bias = bias[None, :, None, None]
    logits = einsum("bhnmk,bhnrk->bhnmr", to_tiles(queries, tiles), keys) + head_bias[..., None]
    there = slot_mask(past)[:, None, None, None]
    best = attend_to_part(jnp.where(there, logits, MASKED), values)
    far = merge_parts([best, AttentionPart(rest[:, :, :, None], lse[..., None] + head_bias)])
    return AttentionPart(
        from_tiles(far.output, tiles), from_tiles(far.lse[..., None], tiles)[..., 0]
    )


def _gather_by_tile(x: Float[Array, "B H C *R"], tiles: QueryTiles) -> Float[Array, "B H N *R"]:
    """Returns the row of x that belongs to the centroid of each tile."""
    flat = x.reshape(*x.shape[:3], -1)
    return gather_by_label(flat, tiles.clusters).reshape(*tiles.clusters.shape, *x.shape[3:])
