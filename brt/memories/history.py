"""A function for layers whose memory has the last tokens of a document.

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

    Only tokens of the document to which the block belongs can be read.

    Args:
      length: the number of tokens of the current document in the memory before the first block.
      document_start: True where a document starts with block n.
      window: the number of tokens of a block.
      size: the number of tokens of the memory.

    Returns:
      The number of tokens for each of N blocks and, in the last column, for the block after them.
    """
    blocks = jnp.arange(document_start.shape[1] + 1)[None]
    starts = jnp.pad(document_start, ((0, 0), (0, 1)))
    last = jax.lax.cummax(jnp.where(starts, blocks, -1), axis=1)
    carried = length[:, None] + blocks * window
    return jnp.minimum(jnp.where(last < 0, carried, (blocks - last) * window), size)
