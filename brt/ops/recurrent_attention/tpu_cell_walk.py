"""The grid of the kernels of the complete cell: lanes, blocks and heads."""

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
    """The grid, and the block specs of arrays [B, N, H, ...].

    Attributes:
      blocks: the number of blocks, N.
      backward: True if blocks are processed in reverse order.
    """

    blocks: int
    backward: bool = False

    def at(self, n: Any) -> Any:
        """Returns the block that step n of the grid's second axis processes."""
        return self.blocks - 1 - n if self.backward else n

    def whole_array(self, x: Any) -> pl.BlockSpec:
        """Returns the spec of a complete array, for all steps."""
        return pl.BlockSpec(x.shape, lambda *_: (0,) * len(x.shape))

    def by_lane(self, x: Any) -> pl.BlockSpec:
        """Returns the spec of one lane of an array [B, ...]."""
        rest = x.shape[1:]
        return pl.BlockSpec((None, *rest), lambda b, *_: (b, *(0 for _ in rest)))

    def by_block(self, x: Any) -> pl.BlockSpec:
        """Returns the spec of one block of an array [B, N, ...]."""
        rest = x.shape[2:]
        return pl.BlockSpec(
            (None, None, *rest), lambda b, n, *_: (b, self.at(n), *(0 for _ in rest))
        )

    def by_head(self, x: Any) -> pl.BlockSpec:
        """Returns the spec of one head of an array [H, ...]."""
        rest = x.shape[1:]
        return pl.BlockSpec((None, *rest), lambda b, n, h, *_: (h, *(0 for _ in rest)))

    def by_step(self, x: Any) -> pl.BlockSpec:
        """Returns the spec of one head of an array [B, N, H, ...]."""
        rest = x.shape[3:]
        return pl.BlockSpec(
            (None, None, None, *rest), lambda b, n, h, *_: (b, self.at(n), h, *(0 for _ in rest))
        )

    def tokens(self, cached: Any, own: Any) -> TokenBlocks:
        """Returns the specs of cached tokens [B, H, W, K] and of a segment's tokens [B, H, T, K].

        The index of the cache changes with the head only in the first block, so the cache is copied
        for that block alone.
        """
        shape = None, None, *cached.shape[2:]
        resting = 0 if self.backward else cached.shape[1] - 1

        def cache_index(b: Any, n: Any, h: Any, *_: Any) -> tuple:
            return b, jax.lax.select(self.at(n) == 0, h, jnp.int32(resting)), 0, 0

        def block(place: Callable[[Any], Any]) -> pl.BlockSpec:
            return pl.BlockSpec(shape, lambda b, n, h, *_: (b, h, place(self.at(n)), 0))

        before = block(lambda n: jnp.maximum(n - 1, 0))
        return TokenBlocks(pl.BlockSpec(shape, cache_index), before, block(lambda n: n))

    def weights(self, weights: CellKernelWeights) -> CellKernelWeights:
        """Returns the specs of the cell's weights."""
        shape = weights.output.shape
        places = jax.tree.map(self.whole_array, weights)
        return places._replace(
            projection=tuple(map(self.by_head, weights.projection)),
            output=pl.BlockSpec((2, None, *shape[2:]), lambda b, n, h, *_: (0, h, 0, 0)),
            scales=self.by_head(weights.scales),
        )

    def residuals(self, x: CellResiduals) -> CellResiduals:
        """Returns the specs of the arrays that the backward pass reads."""
        hidden = None if x.hidden is None else self.by_block(x.hidden)
        return CellResiduals(self.by_block(x.vectors), hidden, *map(self.by_step, x[2:]))
