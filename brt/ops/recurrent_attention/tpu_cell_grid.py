"""The grid (lane, block, head) of the kernels of the complete recurrent cell.

In shapes, B is the number of lanes (rows of the batch), N of blocks of a segment of T tokens, W of
tokens of a block, H of heads and K of numbers of a head.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from brt.ops.recurrent_attention.tpu_cell_arrays import (
    CellKernelWeights,
    CellResiduals,
    TokenBlocks,
)


class CellGrid(NamedTuple):
    """The grid (lane, block, head) of the kernels, whose methods return the block specs of arrays.

    A block spec tells Pallas which part of an array a grid step reads or writes. The methods take
    the array or a description of its shape, such as a `ShapeDtypeStruct`.

    Attributes:
      blocks: N, the number of blocks of tokens in a segment.
      backward: True if blocks are processed in reverse order.
    """

    blocks: int
    backward: bool = False

    def block_of_step(self, n: Any) -> Any:
        """Returns the index of the block of tokens that step n of the grid's axis 1 processes."""
        return self.blocks - 1 - n if self.backward else n

    def whole_array(self, x: Any) -> pl.BlockSpec:
        """Returns the block spec with which every step reads the complete array x."""
        return pl.BlockSpec(x.shape, lambda *_: (0,) * len(x.shape))

    def by_lane(self, x: Any) -> pl.BlockSpec:
        """Returns the block spec with which a step reads x [B, ...] at its lane."""
        rest = x.shape[1:]
        return pl.BlockSpec((None, *rest), lambda b, *_: (b, *(0 for _ in rest)))

    def by_block(self, x: Any) -> pl.BlockSpec:
        """Returns the block spec with which a step reads x [B, N, ...] at its lane and block."""
        rest = x.shape[2:]
        return pl.BlockSpec(
            (None, None, *rest), lambda b, n, *_: (b, self.block_of_step(n), *(0 for _ in rest))
        )

    def by_head(self, x: Any) -> pl.BlockSpec:
        """Returns the block spec with which a step reads x [H, ...] at its head."""
        rest = x.shape[1:]
        return pl.BlockSpec((None, *rest), lambda b, n, h, *_: (h, *(0 for _ in rest)))

    def by_step(self, x: Any) -> pl.BlockSpec:
        """Returns the block spec with which a step reads x [B, N, H, ...] at its lane, block and
        head.
        """
        rest = x.shape[3:]
        return pl.BlockSpec(
            (None, None, None, *rest),
            lambda b, n, h, *_: (b, self.block_of_step(n), h, *(0 for _ in rest)),
        )

    def tokens(self, cached: Any, own: Any) -> TokenBlocks:
        """Returns the block specs of the tokens' keys, or of their values.

        Only the first block of a segment reads the cached tokens. In the steps of all other blocks,
        the block spec of the cache selects the same part, so that Pallas does not copy the cache
        again.

        Args:
          cached: [B, H, W, K], the keys or values of the cached tokens.
          own: [B, H, T, K], the keys or values of the segment's tokens.
        """
        shape = None, None, *cached.shape[2:]
        resting = 0 if self.backward else cached.shape[1] - 1

        def cache_index(b: Any, n: Any, h: Any, *_: Any) -> tuple:
            """Returns the index, along B, H, W and K, of the part of the cache [B, H, W, K] that
            the step at position (b, n, h) of the grid reads.
            """
            return b, jax.lax.select(self.block_of_step(n) == 0, h, jnp.int32(resting)), 0, 0

        def segment_spec(place: Callable[[Any], Any]) -> pl.BlockSpec:
            """Returns the block spec with which the step for block n reads the tokens of block
            `place(n)` of the segment.
            """
            return pl.BlockSpec(shape, lambda b, n, h, *_: (b, h, place(self.block_of_step(n)), 0))

        before = segment_spec(lambda n: jnp.maximum(n - 1, 0))
        return TokenBlocks(pl.BlockSpec(shape, cache_index), before, segment_spec(lambda n: n))

    def weights(self, weights: CellKernelWeights) -> CellKernelWeights:
        """Returns the block specs of `weights`, the arrays of all heads.

        A step reads its head's part of the projections and scales, and all of the other weights.
        """
        shape = weights.output.shape
        places = jax.tree.map(self.whole_array, weights)
        return places._replace(
            projection=tuple(map(self.by_head, weights.projection)),
            output=pl.BlockSpec((2, None, *shape[2:]), lambda b, n, h, *_: (0, h, 0, 0)),
            scales=self.by_head(weights.scales),
        )

    def residuals(self, x: CellResiduals) -> CellResiduals:
        """Returns the block specs of the arrays that the forward pass saves for the backward pass.

        `x` has the arrays, or their shapes.
        """
        hidden = None if x.hidden is None else self.by_block(x.hidden)
        return CellResiduals(self.by_block(x.vectors), hidden, *map(self.by_step, x[2:]))
