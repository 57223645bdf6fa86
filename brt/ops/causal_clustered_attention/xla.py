"""Causal clustered attention in plain XLA.

The tokens of all blocks attend at once. The tokens of a block are sorted by centroid, so that a
centroid's keys are gathered once for several of its queries.

In shapes, B is the number of rows of the batch, H of heads, K of numbers of a head, T of tokens of
a segment, N of its blocks of W tokens, C of centroids of a head, and Q of queries of a block. Each
centroid keeps R keys. Z = T + W counts the cached block, too.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from brt.ops.causal_clustered_attention.centroid_memory import (
    CentroidMemory,
    Centroids,
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
from brt.ops.softmax import MASKED


def memory_scan(
    keys: Float[Array, "B Z H K"],
    values: Float[Array, "B Z H K"],
    cache_mask: Bool[Array, "B N"],
    past: CentroidMemory,
    centroids: Centroids,
) -> tuple[CentroidMemory, CentroidMemory]:
    """Returns the memory of the centroids after the segment, and the memories that the segment's
    blocks read, stacked on a first axis N.

    A memory has the keys and values that each centroid keeps or summarizes of earlier blocks.

    Args:
      keys, values: keys and values of the cached block, followed by those of the segment.
      cache_mask: True where block n may read the block before it. Where False, a new document
        begins, and the memory is emptied.
      past: the memory that the first block reads.
      centroids: the centroids of the layer.
    """

    def add_block(
        past: CentroidMemory, block: tuple[Array, Array, Bool[Array, " B"]]
    ) -> tuple[CentroidMemory, CentroidMemory]:
        """Returns the memory that the next block reads, and the memory that this block reads.

        This is the body of a scan over the blocks of the segment.

        Args:
          past: the memory that the scan hands to this block. In rows of the batch in which the
            block starts a document, the block reads an empty memory instead.
          block: the keys and the values [B, H, W, K] of the previous block; and a mask that is
            False in rows of the batch in which this block starts a document.
        """
        past = empty_memory_unless(past, block[2])
        return memory_after(past, *block, centroids), past

    return jax.lax.scan(add_block, past, (*previous_blocks(keys, values, cache_mask), cache_mask.T))


def causal_clustered_attention(
    queries: Float[Array, "B T H K"],
    window: AttentionPart,
    keys: Float[Array, "B Z H K"],
    values: Float[Array, "B Z H K"],
    cache_mask: Bool[Array, "B N"],
    pasts: CentroidMemory,
    centroids: Centroids,
    bias: Float[Array, " H"],
    *,
    attend_to_self: bool,
) -> Float[Array, "B T H K"]:
    """Returns the attention output of every token over all earlier tokens, in the dtype of
    `values`.

    Args:
      queries: already multiplied by any scale.
      window: the result of attention to each token's window: the output [B, T, H, K] and its
        log-sum-exp [B, T, H].
      keys, values, cache_mask: as for `memory_scan`.
      pasts: the memories that the N blocks read, from `memory_scan`.
      centroids: the centroids of the layer.
      bias: a number for each head, added to the logits of all keys outside the window.
      attend_to_self: True if a token's window ends with the token itself; False if the window ends
        with the token before.
    """
    blocks = cache_mask.shape[1]
    width = queries.shape[1] // blocks
    left = jnp.asarray(np.tri(width, k=0 if attend_to_self else -1, dtype=bool))

    def attend_one_block(
        queries: Float[Array, "B H W K"],
        window: AttentionPart,
        before: tuple[Array, Array],
        cache_mask: Bool[Array, " B"],
        past: CentroidMemory,
    ) -> Float[Array, "B H W K"]:
        """Returns the attention output of the queries of one block over all earlier tokens.

        Args:
          queries: the queries of the block.
          window: the result of these queries' attention to their windows: output [B, H, W, K] and
            log-sum-exp [B, H, W].
          before: the keys and the values of the previous block, each [B, H, W, K].
          cache_mask: True if the block may read the previous block.
          past: the memory that the block reads.
        """
        mask = left[None] & cache_mask[:, None, None]
        return attend_block(queries, window, *before, mask, past, centroids, bias)

    parts = AttentionPart(*(split_blocks(x, blocks) for x in window))
    before = previous_blocks(keys, values, cache_mask)
    y = jax.vmap(attend_one_block)(
        split_blocks(queries, blocks), parts, before, cache_mask.T, pasts
    )
    return join_blocks(y)


def previous_blocks(
    keys: Float[Array, "B Z H K"], values: Float[Array, "B Z H K"], cache_mask: Bool[Array, "B N"]
) -> tuple[Float[Array, "N B H W K"], Float[Array, "N B H W K"]]:
    """Returns the block before each block of the segment."""
    blocks = cache_mask.shape[1]
    tokens = keys.shape[1] // (blocks + 1) * blocks
    return split_blocks(keys[:, :tokens], blocks), split_blocks(values[:, :tokens], blocks)


def split_blocks(x: Float[Array, "B T H *K"], blocks: int) -> Float[Array, "N B H W *K"]:
    """Returns x, split along its tokens into blocks of equal size, with the heads before them."""
    cut = x.reshape(x.shape[0], blocks, -1, *x.shape[2:])
    return jnp.moveaxis(cut, (1, 3), (0, 2))


def join_blocks(x: Float[Array, "N B H W K"]) -> Float[Array, "B T H K"]:
    """Returns the blocks x as the tokens of a segment; the inverse of `split_blocks`."""
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
    """Returns the attention output of the queries of a block over all earlier tokens, in the dtype
    of `values`.

    Args:
      queries: queries of the block.
      window: the result of attention to the queries' windows: the output [B, H, Q, K] and the
        log-sum-exp [B, H, Q].
      keys, values: keys and values of the previous block.
      mask: True for keys of the previous block that have left a query's window and that the query
        may read.
      past: the memory that the block reads.
      centroids: the centroids of the layer.
      bias: a number for each head, added to the logits of all keys outside the window.
    """
    logits = _product("bhqk,bhsk->bhqs", queries, keys) + bias[None, :, None, None]
    nearby = attend_to_part(jnp.where(mask[:, None], logits, MASKED), values)
    y = merge_parts([window, nearby, _attend_to_memory(queries, past, centroids, bias)])
    return y.output.astype(values.dtype)


def _attend_to_memory(
    queries: Float[Array, "B H Q K"],
    past: CentroidMemory,
    centroids: Centroids,
    bias: Float[Array, " H"],
) -> AttentionPart:
    """Returns the result of each query's attention to the keys that its centroid keeps and to the
    centroid's summary of all other keys.
    """
    clusters, tokens = past.keys.shape[2], queries.shape[2]
    size = max(tokens // (2 * clusters), 1)
    tiles = build_tiles(nearest_centroids(queries, centroids), clusters=clusters, size=size)
    keys, values, rest, lse = (_gather_by_tile(x, tiles) for x in past[:-1])
    head_bias = bias[None, :, None, None]
    logits = _product("bhnmk,bhnrk->bhnmr", to_tiles(queries, tiles), keys) + head_bias[..., None]
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


def _product(spec: str, a: Array, b: Array) -> Array:
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)
