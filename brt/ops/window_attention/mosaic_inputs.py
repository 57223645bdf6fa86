"""Inputs of the kernels in `mosaic_kernels`, and their division into tiles.

This module does not import Mosaic GPU, so it can be imported with every version of jax. In shapes,
W is the number of tokens of a window and of a block, N of blocks of a segment, and Z = W + T of
tokens with those of the block before the segment.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

TILE = 64  # A tile has this many rows, as many as a warpgroup's matrix product has.
# Vectors are split into parts of at most this many numbers, because a matrix product with longer
# vectors would spill registers.
_MAX_PART = 128
_ABOVE_ANY_TILE = 1 << 20  # This number is greater than the index of any tile.


def vector_parts(x: Array) -> int:
    """Returns the number of parts of x [..., K] along K; a tile of a part fits into registers."""
    return -(-x.shape[-1] // _MAX_PART)


def opaque_zero(n: Array) -> Array:
    """Returns zero, computed from n < 2**20 so that the compiler does not recognise a constant.

    If the compiler knows the index of an operand of a matrix product, it computes the descriptors
    of this operand for all unrolled iterations of a loop in advance and keeps the descriptors in
    registers, which the matrix products need. Callers therefore use this zero instead of the
    constant 0 as an index, or add it to an index.
    """
    return jax.lax.div(n, _ABOVE_ANY_TILE)


class WindowMosaicInputs(NamedTuple):
    """References to the inputs of a kernel in global memory; an unused input is None.

    Key tiles are counted from the start of the block before the segment, so the window of query
    tile i begins at key tile i. The index `lane` is that of the row of the batch.
    """

    q: Any  # The queries [B, T, H, K].
    keys: Any  # The keys of the block before the segment and of the segment [B, Z, H, K].
    values: Any  # The values of the same tokens [B, Z, H, K].
    # Bias and mask for a tile of queries and all keys in their windows, float32
    # [H, TILE, W + TILE]. Column s * TILE + c is for key c of the s-th key tile, counted from the
    # farthest.
    strip: Any
    cache_mask: Any  # Not zero where a block may read the block before it, int32 [B, N].
    # Bias and mask for a tile of keys (rows) and all queries that see these keys (columns), float32
    # [H, TILE, W + TILE]; for the backward pass only, like `gradient` and `sums`.
    transposed_strip: Any = None
    gradient: Any = None  # The gradient of the output [B, T, H, K].
    # Two numbers for each query [B, H, 2, T]: the log-sum-exp of the logits, and the number that
    # the gradient of the softmax subtracts. The latter is the sum over the keys of the weight times
    # the weight's gradient, minus the gradient of the log-sum-exp.
    sums: Any = None
    # Factors of the weights of heads, queries of a block and slots [H, W, W]; queries and slots are
    # swapped for the kernel that computes the gradients of keys.
    dropout: Any = None

    @property
    def tiles_per_window(self) -> int:
        return (self.keys.shape[1] - self.q.shape[1]) // TILE

    def key_tile_range(self, lane: Array, i: Array) -> tuple[Array, Array]:
        """Returns the first key tile that query tile i may read, and the end (exclusive)."""
        block = jax.lax.div(i, self.tiles_per_window)
        flag = self.cache_mask[lane, block]
        first = jnp.where(flag > 0, i, (block + 1) * self.tiles_per_window)
        return first, i + self.tiles_per_window + 1 + opaque_zero(flag)

    def query_tile_range(self, lane: Array, j: Array) -> tuple[Array, Array]:
        """Returns the first query tile that may read key tile j, and the end (exclusive)."""
        block = jax.lax.div(j, self.tiles_per_window)
        following = jnp.minimum(block, self.cache_mask.shape[1] - 1)
        end = jnp.where(self.cache_mask[lane, following] > 0, j + 1, block * self.tiles_per_window)
        begin = jnp.maximum(j - self.tiles_per_window, 0)
        return begin, jnp.minimum(end, self.q.shape[1] // TILE)
