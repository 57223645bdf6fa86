"""Transient global tokens (LongT5, Guo et al. 2022, section 3.1.2).

The tokens of a source are split into short blocks. Each block has a global token, the sum of the
vectors of its tokens, to which all tokens of the source attend. The last tokens, if they do not
fill a block, belong to the last full block. A source shorter than a block has no global token.

In shapes, B is the number of sources, T of tokens of a source, G of global tokens of a source
without padding, H of heads, and K of numbers of a head.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from brt.ops.relative_bias import relative_buckets


class GlobalBlocks(NamedTuple):
    """The division of sources into blocks, each of which has one global token.

    Attributes:
      ids: int32 [B, T], the index of the token's block; -1 for padding, and for all tokens of a
        source without global tokens.
      exist: bool [B, G], True for the blocks that the source has. A source with padding may have
        fewer than G blocks; the last entries are then False.
    """

    ids: Int[Array, "B T"]
    exist: Bool[Array, "B G"]


class GlobalKeys(NamedTuple):
    """Keys and values of global tokens, which every token sees in addition to its neighbours.

    Attributes:
      keys, values: [B, G, H, K], the keys and values.
      bias: float32 [B, H, T, G], the bias between tokens and global tokens; None for no bias.
      exist: bool [B, G], True for keys that exist; other keys are masked.
    """

    keys: Float[Array, "B G H K"]
    values: Float[Array, "B G H K"]
    bias: Float[Array, "B H T G"] | None
    exist: Bool[Array, "B G"]


def global_blocks(mask: Bool[Array, "B T"], size: int) -> GlobalBlocks:
    """Returns the division of sources into blocks of `size` tokens.

    Args:
      mask: False for padding, which must be at the end of a row.
      size: the number of tokens of a block.
    """
    tokens = mask.shape[1]
    full = jnp.sum(mask, axis=1, dtype=jnp.int32)[:, None] // size
    place = jnp.asarray(np.arange(tokens, dtype=np.int32) // size)[None]
    ids = jnp.where(mask, jnp.minimum(place, full - 1), -1)
    return GlobalBlocks(ids, jnp.arange(tokens // size)[None] < full)


def block_sums(x: Float[Array, "B T D"], blocks: GlobalBlocks) -> Float[Array, "B G D"]:
    """Returns the sum (not the mean) of x over the tokens of each block, in x's dtype.

    Args:
      x: a vector of D numbers for each token.
      blocks: the block of each token, from `global_blocks`.
    """
    members = blocks.ids[:, :, None] == jnp.arange(blocks.exist.shape[1])[None, None]
    sums = jnp.einsum(
        "btg,btd->bgd", members.astype(x.dtype), x, preferred_element_type=jnp.float32
    )
    return sums.astype(x.dtype)


def global_key_bias(
    table: Float[Array, "R H"], blocks: GlobalBlocks, *, max_distance: int
) -> Float[Array, "B H T G"]:
    """Returns the bias between each token and each global token.

    The bias depends on the distance between the block of the token and the block that the global
    token stands for.

    Args:
      table: the bias of each of R buckets of distances.
      blocks: the block of each token.
      max_distance: a number of blocks. From this distance on, all blocks before the token share one
        bucket, and all blocks after the token share another one.
    """
    count = blocks.exist.shape[1]
    # Without global tokens, `by_block` below would be empty, and `jnp.take` cannot take rows from
    # an empty array.
    if not count:
        return jnp.zeros((blocks.ids.shape[0], table.shape[1], blocks.ids.shape[1], 0))
    offsets = np.arange(count)[None, :] - np.arange(count)[:, None]
    rows = relative_buckets(
        offsets, buckets=table.shape[0], max_distance=max_distance, both_ways=True
    )
    # The axes of `by_block` are the token's block, the global token and the head.
    by_block = jnp.take(table, rows, axis=0)
    by_token = jnp.take(by_block, jnp.maximum(blocks.ids, 0), axis=0, mode="clip")
    return by_token.transpose(0, 3, 1, 2)
