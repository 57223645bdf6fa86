"""How the kernel of the whole cell walks over lanes, blocks and heads."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from brt.ops.recurrent_attention.tpu_cell_arrays import Kept, Tokens, Weights


class Walk(NamedTuple):
    """The grid, and where its steps find their parts of arrays [B, N, H, ...].

    Attributes:
      blocks: N.
      backward: whether they come in reverse order.
    """

    blocks: int
    backward: bool = False

    def at(self, n: Any) -> Any:
        return self.blocks - 1 - n if self.backward else n

    def everywhere(self, x: Any) -> pl.BlockSpec:
        return pl.BlockSpec(x.shape, lambda *_: (0,) * len(x.shape))

    def by_lane(self, x: Any) -> pl.BlockSpec:
        rest = x.shape[1:]
        return pl.BlockSpec((None, *rest), lambda b, *_: (b, *(0 for _ in rest)))

    def by_block(self, x: Any) -> pl.BlockSpec:
        rest = x.shape[2:]
        return pl.BlockSpec(
            (None, None, *rest), lambda b, n, *_: (b, self.at(n), *(0 for _ in rest))
        )

    def by_head(self, x: Any) -> pl.BlockSpec:
        """Of [H, ...]."""
        rest = x.shape[1:]
        return pl.BlockSpec((None, *rest), lambda b, n, h, *_: (h, *(0 for _ in rest)))

    def by_step(self, x: Any) -> pl.BlockSpec:
        rest = x.shape[3:]
        return pl.BlockSpec(
            (None, None, None, *rest), lambda b, n, h, *_: (b, self.at(n), h, *(0 for _ in rest))
        )

    def tokens(self, cached: Any, own: Any) -> Tokens:
        """Of [B, H, W, K] and [B, H, T, K]; what was cached is read for the first block alone."""
        shape = None, None, *cached.shape[2:]
        resting = 0 if self.backward else cached.shape[1] - 1

        def of_cache(b: Any, n: Any, h: Any, *_: Any) -> tuple:
            return b, jax.lax.select(self.at(n) == 0, h, jnp.int32(resting)), 0, 0

        def block(place: Callable[[Any], Any]) -> pl.BlockSpec:
            return pl.BlockSpec(shape, lambda b, n, h, *_: (b, h, place(self.at(n)), 0))

        before = block(lambda n: jnp.maximum(n - 1, 0))
        return Tokens(pl.BlockSpec(shape, of_cache), before, block(lambda n: n))

    def weights(self, weights: Weights) -> Weights:
        shape = weights.output.shape
        places = jax.tree.map(self.everywhere, weights)
        return places._replace(
            projection=tuple(map(self.by_head, weights.projection)),
            output=pl.BlockSpec((2, None, *shape[2:]), lambda b, n, h, *_: (0, h, 0, 0)),
            scales=self.by_head(weights.scales),
        )

    def kept(self, x: Kept) -> Kept:
        hidden = None if x.hidden is None else self.by_block(x.hidden)
        return Kept(self.by_block(x.vectors), hidden, *map(self.by_step, x[2:]))
