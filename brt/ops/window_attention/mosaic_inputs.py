"""Inputs of the kernels in `mosaic_kernels`, and their division into tiles.

This module does not import Mosaic GPU, so it can be imported with every version of jax.

In shapes, B is the number of lanes (rows of the batch), H of heads, K of numbers of a head, T of
tokens of a segment, W of tokens of a window and of a block, and N of blocks of a segment; Z = W + T
counts the block before the segment, too.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

TILE = 64  # A tile has this many rows, as many as one matrix product of a warpgroup.
# Vectors are split into parts of at most this many numbers, because a matrix product with longer
# vectors would spill registers.
_MAX_PART = 128
_ABOVE_ANY_TILE = 1 << 20  # This number is greater than the index of any tile.


def vector_parts(x: Array) -> int:
    """Returns the number of parts into which the columns of the vectors x [..., K] are split, so
    that a tile of each part fits into registers.
    """
    return -(-x.shape[-1] // _MAX_PART)


def opaque_zero(n: Array) -> Array:
    """Returns zero in a form that the compiler cannot recognise as zero, computed from `n`, a
    number of tiles.

    If the compiler knows the index of an operand, it computes the descriptors of this operand for
    all unrolled iterations of a loop in advance and keeps them in registers, which the matrix
    products need. A caller adds this zero to the index to hide the index from the compiler.
    """
    return jax.lax.div(n, _ABOVE_ANY_TILE)


class WindowMosaicInputs(NamedTuple):
    """References to the inputs in global memory; an input that a kernel does not use is None.

    The fields from `transposed_strip` to `sums` are for the backward pass only.

    Attributes:
      q: [B, T, H, K], queries.
      keys, values: [B, Z, H, K], the keys and values of the window before the segment and of the
        segment.
      strip: float32 [H, TILE, W + TILE], bias and mask for a tile of queries. Column s * TILE + c
        is key c of the s-th key tile in the window, counted from the farthest.
      cache_mask: int32 [B, N], not zero where a block may read the block before it.
      transposed_strip: float32 [H, TILE, W + TILE], bias and mask for a tile of keys, whose columns
        are queries.
      gradient: [B, T, H, K], gradient of the output.
      sums: [B, H, 2, T], each row's log-sum-exp and its sum of weights times their gradients, which
        the gradient of the softmax subtracts.
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

    def window_of(self, lane: Array, i: Array) -> tuple[Array, Array]:
        """Returns the range of key tiles that query tile i of a lane may read: the first index and
        the end (exclusive).

        The window of query tile i begins at key tile i.
        """
        block = jax.lax.div(i, self.tiles_per_window)
        flag = self.cache_mask[lane, block]
        first = jnp.where(flag > 0, i, (block + 1) * self.tiles_per_window)
        return first, i + self.tiles_per_window + 1 + opaque_zero(flag)

    def readers(self, lane: Array, j: Array) -> tuple[Array, Array]:
        """Returns the range of query tiles of a lane that may read key tile j: the first index and
        the end (exclusive).
        """
        block = jax.lax.div(j, self.tiles_per_window)
        following = jnp.minimum(block, self.cache_mask.shape[1] - 1)
        end = jnp.where(self.cache_mask[lane, following] > 0, j + 1, block * self.tiles_per_window)
        begin = jnp.maximum(j - self.tiles_per_window, 0)
        return begin, jnp.minimum(end, self.q.shape[1] // TILE)
