"""Counts the tokens that each block of a segment may read in a memory of past tokens."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def tokens_before(
    length: Int[Array, " B"], document_start: Bool[Array, "B N"], *, window: int, size: int
) -> Int[Array, "B N+1"]:
    """Returns the number of tokens of its document that each block, and the block after the
    segment, can read in a memory of the last `size` tokens before the block.

    `length` is the number of tokens in the memory before the segment that belong to the document
    that a row is reading, and `window` the number of tokens of a block.
    """
    blocks = jnp.arange(document_start.shape[1] + 1)[None]
    starts = jnp.pad(document_start, ((0, 0), (0, 1)))
    last = jax.lax.cummax(jnp.where(starts, blocks, -1), axis=1)
    carried = length[:, None] + blocks * window
    return jnp.minimum(jnp.where(last < 0, carried, (blocks - last) * window), size)
