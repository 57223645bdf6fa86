"""Inputs of the kernels in `mosaic_kernels`, and their division into tiles.

This module does not import Mosaic GPU, so it can be imported with every version of jax.

In shapes, B is the number of lanes (rows of the batch), H of heads, K of numbers of a head, T of
tokens of a segment, W of tokens of a window and of a block, and N of blocks of a segment; Z = W + T
includes the tokens of the block before the segment.
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
    """Returns the number of parts into which the K columns of x [..., K] are split, so that a tile
    of each part fits into registers.
    """
    return -(-x.shape[-1] // _MAX_PART)


def opaque_zero(n: Array) -> Array:
    """Returns zero, computed from `n` so that the compiler does not recognise it as a constant.

    If the compiler knows the index of an operand of a matrix product, it computes the descriptors
    of this operand for all unrolled iterations of a loop in advance and keeps the descriptors in
    registers. The matrix products need these registers. Callers therefore use this zero instead of
    the constant 0 as an index, or add it to an index.

    Args:
      n: an integer from 0 to 2**20 - 1, such as the index of a tile or an entry of a mask.
    """
    return jax.lax.div(n, _ABOVE_ANY_TILE)


class WindowMosaicInputs(NamedTuple):
    """References to the inputs of a kernel in global memory; an unused input is None.

    The fields `transposed_strip`, `gradient` and `sums` are for the backward pass only.

    Attributes:
      q: [B, T, H, K], queries.
      keys, values: [B, Z, H, K], the keys and values of the window before the segment and of the
        segment.
      strip: float32 [H, TILE, W + TILE], bias and mask for a tile of queries and all keys in their
        windows. Column s * TILE + c is for key c of the s-th key tile, counted from the farthest.
      cache_mask: int32 [B, N], not zero where a block may read the block before it.
      transposed_strip: float32 [H, TILE, W + TILE], bias and mask for a tile of keys (rows) and all
        queries that see these keys (columns).
      gradient: [B, T, H, K], gradient of the output.
      sums: [B, H, 2, T], two numbers for each query: the log-sum-exp of the logits, and the number
        that the gradient of the softmax subtracts. The latter is the sum over the keys of the
        weight times the weight's gradient, minus the gradient of the log-sum-exp.
      dropout: [H, W, W], factors of the weights; transposed for the kernel that computes the
        gradients of keys.
    """

    q: Any
    keys: Any
    values: Any
    strip: Any
    cache_mask: Any
    transposed_strip: Any = None
    gradient: Any = None
    sums: Any = None
    dropout: Any = None

    @property
    def tiles_per_window(self) -> int:
        """The number of tiles that the keys of a window fill."""
        return (self.keys.shape[1] - self.q.shape[1]) // TILE

    def key_tile_range(self, lane: Array, i: Array) -> tuple[Array, Array]:
        """Returns the range of key tiles that query tile i of a lane may read: the first index and
        the end (exclusive).

        Key tiles are counted from the start of the block before the segment, so the window of query
        tile i begins at key tile i.
        """
        block = jax.lax.div(i, self.tiles_per_window)
        flag = self.cache_mask[lane, block]
        first = jnp.where(flag > 0, i, (block + 1) * self.tiles_per_window)
        return first, i + self.tiles_per_window + 1 + opaque_zero(flag)

    def query_tile_range(self, lane: Array, j: Array) -> tuple[Array, Array]:
        """Returns the range of query tiles of a lane that may read key tile j: the first index and
        the end (exclusive).

        Key tiles are counted from the start of the block before the segment.
        """
        block = jax.lax.div(j, self.tiles_per_window)
        following = jnp.minimum(block, self.cache_mask.shape[1] - 1)
        end = jnp.where(self.cache_mask[lane, following] > 0, j + 1, block * self.tiles_per_window)
        begin = jnp.maximum(j - self.tiles_per_window, 0)
        return begin, jnp.minimum(end, self.q.shape[1] // TILE)
