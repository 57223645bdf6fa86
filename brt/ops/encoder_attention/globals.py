"""Transient global tokens (LongT5, Guo et al. 2022, section 3.1.2).

The tokens of a source are split into short blocks. Each block has a global token, which is the sum
of the vectors of the block's tokens. All tokens of the source attend to all of its global tokens.
If the last tokens do not fill a block, they belong to the last full block. A source shorter than a
block has no global token. In shapes, B is the number of sources, and G the number of global tokens
of a source without padding.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from brt.ops.positions import relative_buckets


class GlobalBlocks(NamedTuple):
    """The division of sources into blocks, each of which has one global token."""

    # the block of each token; -1 for padding and in sources without global tokens
    ids: Int[Array, "B T"]
    # False for the last entries, if a source with padding has fewer than G blocks
    exist: Bool[Array, "B G"]


class GlobalKeys(NamedTuple):
    """Keys and values of global tokens, which every token sees in addition to its neighbours."""

    keys: Float[Array, "B G H K"]
    values: Float[Array, "B G H K"]
    bias: Float[Array, "B H T G"] | None
    exist: Bool[Array, "B G"]  # False for masked keys


class LocalInputs(NamedTuple):
    """The arrays of `api.local_attention`, which describes them."""

    queries: Float[Array, "B T H K"]
    keys: Float[Array, "B T H K"]
    values: Float[Array, "B T H K"]
    bias: Float[Array, "H W X"] | None
    mask: Bool[Array, "B T"]
    global_keys: GlobalKeys | None = None


def global_blocks(mask: Bool[Array, "B T"], size: int) -> GlobalBlocks:
    """Divides sources into blocks of `size` tokens; padding must be at the end of a row."""
    tokens = mask.shape[1]
    full = jnp.sum(mask, axis=1, dtype=jnp.int32)[:, None] // size
    place = jnp.asarray(np.arange(tokens, dtype=np.int32) // size)[None]
    ids = jnp.where(mask, jnp.minimum(place, full - 1), -1)
    return GlobalBlocks(ids, jnp.arange(tokens // size)[None] < full)


def block_sums(x: Float[Array, "B T D"], blocks: GlobalBlocks) -> Float[Array, "B G D"]:
    """Returns the sum (not the mean) of x over the tokens of each block."""
    members = blocks.ids[:, :, None] == jnp.arange(blocks.exist.shape[1])[None, None]
    sums = jnp.einsum(
        "btg,btd->bgd", members.astype(x.dtype), x, preferred_element_type=jnp.float32
    )
    return sums.astype(x.dtype)


def global_key_bias(
    table: Float[Array, "R H"], blocks: GlobalBlocks, *, max_distance: int
) -> Float[Array, "B H T G"]:
    """Returns the bias between each token and each global token, by the distance of their blocks.

    The table has R buckets of distances. All blocks on one side of the token that are at least
    `max_distance` blocks away share one bucket.
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
