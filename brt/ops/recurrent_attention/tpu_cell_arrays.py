"""What the kernel of the whole cell reads and writes, or where it lies: see `tpu_cell`."""

from typing import Any, NamedTuple

import jax
from jaxtyping import Array


class Flags(NamedTuple):
    """[B, N], of all lanes and blocks."""

    cache_mask: Any
    starts: Any


class Weights(NamedTuple):
    """Of the cell; of what heads have, one's.

    Attributes:
      norm, gate: [1, D].
      ids, initial: [S, D]; forward only.
      projection: four of [D, K]: of keys, of both queries, of values.
      output: [2, K, D].
      scales: [2, 128].
    """

    norm: Any
    gate: Any
    projection: Any
    output: Any
    scales: Any
    ids: Any = None
    initial: Any = None


class Tokens(NamedTuple):
    """Keys or values of a head, each [W, K]: cached, of the block before, and of this one."""

    cached: Any
    before: Any
    own: Any

    def both(self, first: Array) -> tuple[Array, Any]:
        """Those of two blocks; `first`: whether there is none before this one in the segment."""
        return jax.lax.select(first, self.cached[...], self.before[...]), self.own


class Kept(NamedTuple):
    """What the backward pass reads of a block.

    Attributes:
      vectors: [S, D], the states before it, float32.
      hidden: [S, D], what the projection reads; of it only the weights' gradient is made.
      projected: [4, S, K].
      y: [2, S, K].
      lse: [2, 1, S].
    """

    vectors: Any
    hidden: Any
    projected: Any
    y: Any
    lse: Any


class Shown(NamedTuple):
    """Two of [S, K]: of the states before a block, that its tokens read."""

    keys: Any
    values: Any


class Sums(NamedTuple):
    """On the chip over the blocks of a lane, backward.

    Attributes:
      carry: [S, D], the gradient of the states.
      after: [S, D], the states that came of a block.
      hidden: [S, D], the gradient of what the projection reads.
      read: [2, S, K], that of what states read.
      attended: two of [S + 2 W, K], of keys and of values.
      behind: two of [H, W, K], likewise of this block's tokens, by the block behind it.
    """

    carry: Any
    after: Any
    hidden: Any
    read: Any
    attended: tuple[Any, Any]
    behind: tuple[Any, Any]


class Gradients(NamedTuple):
    """Of a step of the grid, or of its block or lane.

    Attributes:
      projected: [4, S, K].
      update: [S, D], of the output product.
      keys, values: two of [W, K]: of tokens that were cached, and of this block's.
      vectors, initial, ids: [S, D].
      norm, gate: [1, D].
      scales: [2, 128].
    """

    projected: Any
    update: Any
    keys: tuple[Any, Any]
    values: tuple[Any, Any]
    vectors: Any
    initial: Any
    ids: Any
    norm: Any
    gate: Any
    scales: Any
