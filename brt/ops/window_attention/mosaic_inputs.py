"""What the kernels of `mosaic_kernels` are given, in tiles; nothing here needs Mosaic GPU."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

TILE = 64  # rows: what one product of a warpgroup has
_PART = 128  # numbers of a vector that one product adds up in registers, at most
_MANY = 1 << 20  # more tiles than there are


def parts_of(x: Array) -> int:
    """Of vectors that are too long for one product's registers."""
    return -(-x.shape[-1] // _PART)


def zero(n: Array) -> Array:
    """Of a flag or a number of tiles; the compiler does not know it.

    Of an operand that is the same in all turns of a loop, and of all in a loop that it unrolls, it
    would keep descriptors for each product, in the registers that the products need.
    """
    return jax.lax.div(n, _MANY)


class Inputs(NamedTuple):
    """Where they are in global memory; None: there is none.

    Attributes:
      strip: float32, bias and mask by row of a tile of queries: its column s * TILE + c is key c
        of the tile of keys that is the s-th, from the farthest, which the queries see.
      cache_mask: int32 [B, N].
      turned: the strip by row of a tile of keys, the columns being those of queries; of it the
        rest in the backward pass only.
      gradient: of the output.
      sums: of every row the log-sum-exp, and what the softmax's own gradient subtracts.
      dropout: factors of weights; for a kernel that owns keys, by slot first.
    """

    q: Any  # [B, T, H, K]
    keys: Any  # [B, Z, H, K]
    values: Any  # [B, Z, H, K]
    strip: Any  # [H, TILE, W + TILE]
    cache_mask: Any
    turned: Any = None  # [H, TILE, W + TILE]
    gradient: Any = None  # [B, T, H, K]
    sums: Any = None  # [B, H, 2, T]
    dropout: Any = None  # [H, W, W]

    @property
    def per_window(self) -> int:
        """Tiles of a window."""
        return (self.keys.shape[1] - self.q.shape[1]) // TILE

    def seen(self, lane: Array, i: Array) -> tuple[Array, Array]:
        """Of the tiles of keys that tile i of the queries sees, of which tile i is the first: the
        first that it may read, and the one behind the last."""
        block = jax.lax.div(i, self.per_window)
        flag = self.cache_mask[lane, block]
        first = jnp.where(flag > 0, i, (block + 1) * self.per_window)
        return first, i + self.per_window + 1 + zero(flag)

    def readers(self, lane: Array, j: Array) -> tuple[Array, Array]:
        """The tiles of queries, from and to, that may read tile j of the keys."""
        block = jax.lax.div(j, self.per_window)
        following = jnp.minimum(block, self.cache_mask.shape[1] - 1)
        end = jnp.where(self.cache_mask[lane, following] > 0, j + 1, block * self.per_window)
        begin = jnp.maximum(j - self.per_window, 0)
        return begin, jnp.minimum(end, self.q.shape[1] // TILE)
