"""Counts the tokens that each block of a segment may read in a memory of past tokens.

In shapes, B is the number of rows of the batch, and N of blocks of a segment.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def tokens_before(
    length: Int[Array, " B"], document_start: Bool[Array, "B N"], *, window: int, size: int
) -> Int[Array, "B N+1"]:
    """Returns the number of tokens that each block can read in a memory of the last `size` tokens
    before the block.

    A block can read only tokens of its own document, so the number is 0 for the first block of a
    document.

    Args:
      length: for each row, the number of tokens in the memory before the first block that belong to
        the document that the row is reading.
      document_start: True where a document starts with block n.
      window: the number of tokens of a block.
      size: the number of tokens for which the memory has places.

    Returns:
      The number of tokens for each of N blocks and, in the last column, for the block after them.
    """
    blocks = jnp.arange(document_start.shape[1] + 1)[None]
    starts = jnp.pad(document_start, ((0, 0), (0, 1)))
    last = jax.lax.cummax(jnp.where(starts, blocks, -1), axis=1)
    carried = length[:, None] + blocks * window
    return jnp.minimum(jnp.where(last < 0, carried, (blocks - last) * window), size)
