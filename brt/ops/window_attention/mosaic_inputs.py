"""Inputs of the kernels in `mosaic_kernels`, in tiles. This module does not need Mosaic GPU."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

TILE = 64  # Rows of a tile, as many as one matrix product of a warpgroup has.
_MAX_PART = 128  # Most elements of a vector that one matrix product takes without spilling.
_ABOVE_ANY_TILE = 1 << 20  # A number greater than the number of tiles of any array.


def vector_parts(x: Array) -> int:
    """Returns the number of parts that vectors are split into to fit into registers."""
    return -(-x.shape[-1] // _MAX_PART)


def opaque_zero(n: Array) -> Array:
    """Returns zero, computed from a number of tiles so that the compiler cannot know the value.

    The compiler would keep the descriptors of operands that do not change in a loop, and of all
    iterations that it unrolls, in registers that the products need. An index that the compiler does
    not know prevents this.
    """
    return jax.lax.div(n, _ABOVE_ANY_TILE)


class WindowMosaicInputs(NamedTuple):
    """References to the inputs in global memory; an input that a kernel does not use is None.

    Attributes:
      q: [B, T, H, K].
      keys, values: [B, Z, H, K], with the window before the segment.
      strip: float32 [H, TILE, W + TILE], bias and mask for a tile of queries. Column s * TILE + c
        is key c of the s-th key tile in the window, counted from the farthest.
      cache_mask: int32 [B, N], not zero where a block may read the block before it.
      transposed_strip: float32 [H, TILE, W + TILE], bias and mask for a tile of keys, whose columns
        are queries; in the backward pass only, as all that follow.
      gradient: [B, T, H, K], gradient of the output.
      sums: [B, H, 2, T], each row's log-sum-exp and its sum of weights times their gradients, which
        the gradient of the softmax subtracts.
      dropout: [H, W, W], factors of the weights; transposed for the kernel that owns keys.
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
    def per_window(self) -> int:
        """Number of tiles of a window."""
        return (self.keys.shape[1] - self.q.shape[1]) // TILE

    def seen(self, lane: Array, i: Array) -> tuple[Array, Array]:
        """Returns the first key tile that query tile i may read, and the last one (exclusive).

        The window of query tile i begins at key tile i.
        """
        block = jax.lax.div(i, self.per_window)
        flag = self.cache_mask[lane, block]
        first = jnp.where(flag > 0, i, (block + 1) * self.per_window)
        return first, i + self.per_window + 1 + opaque_zero(flag)

    def readers(self, lane: Array, j: Array) -> tuple[Array, Array]:
        """Returns the first and the last (exclusive) query tile that may read key tile j."""
        block = jax.lax.div(j, self.per_window)
        following = jnp.minimum(block, self.cache_mask.shape[1] - 1)
        end = jnp.where(self.cache_mask[lane, following] > 0, j + 1, block * self.per_window)
        begin = jnp.maximum(j - self.per_window, 0)
        return begin, jnp.minimum(end, self.q.shape[1] // TILE)
