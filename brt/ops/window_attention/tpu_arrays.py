"""Inputs and gradients of the TPU kernels of window attention, or their block specs.

The module `pallas_tpu` describes the algorithm. A row is a query. A row sees W keys, which are in
its own block of W tokens and in the block before, and the kernels keep them in W slots: slot c of a
row is key c of the row's own block if the row sees this key, and otherwise key c of the previous
block. Logits are slots x rows.

In shapes, W is the number of tokens of a block and of a window, K the size of a head, and R the
number of rows of a tile.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array


class WindowBlocks(NamedTuple):
    """Keys, or values, that a block sees; each field is [W, K].

    Attributes:
      cached: the keys or values of the cached block, which is the block before the segment.
      before: the keys or values of the previous block, if that block is in the segment.
      own: the keys or values of the block that is being processed.
    """

    cached: Any
    before: Any
    own: Any

    def previous_and_own(self, first: Array) -> tuple[Array, Array]:
        """Returns the keys (or values) of the previous block and of this block.

        If `first` is True, this block is the first block of the segment, and the previous block is
        the cached block.
        """
        return jax.lax.select(first, self.cached[...], self.before[...]), self.own[...]


class WindowKernelInputs(NamedTuple):
    """Inputs of a step of the grid, or their block specs; an input that is not needed is None.

    The fields `gradient`, `lse` and `along` are for the backward pass only.

    Attributes:
      q: [W, K], queries of the block.
      keys, values: the keys and values of the previous block and of this block.
      scale: [1, 128], the length of the queries after normalization in every lane of a register, if
        the kernel normalizes queries and keys.
      tile: [W, R], the bias of each slot for the first R rows of a block.
      dropout: the mask of kept weights, slots x rows, packed by `dropout_bits`.
      gradient: [W, K], gradient of the output.
      lse: [1, W], the log-sum-exp of each row's logits, as unsigned integers with the same bits.
      along: [1, W], for each row the sum of the weights times their gradients, which the softmax's
        gradient subtracts.
    """

    q: Any
    keys: WindowBlocks
    values: WindowBlocks
    scale: Any = None
    tile: Any = None
    dropout: Any = None
    gradient: Any = None
    lse: Any = None
    along: Any = None


class WindowKernelGradients(NamedTuple):
    """Gradients that a step of the backward kernel writes.

    Attributes:
      q: [W, K], the gradient of the block's queries.
      keys, values: [W, K], the gradients of the keys and values of the previous block.
      cached_keys, cached_values: [W, K], gradients of the cached keys and values, written by a
        segment's first step.
      scale, tile: float32 [1, 128] and [W, R], the gradients of the inputs of these names, summed
        over all steps of a head.
    """

    q: Any
    keys: Any
    values: Any
    cached_keys: Any
    cached_values: Any
    scale: Any
    tile: Any


class BlockDocuments(NamedTuple):
    """The starts of the documents of the block that a step of the grid reads.

    Attributes:
      first: [B, D], the place of the first token of the document of each part of the segment.
      lane, n: the lane and the block of the step.
      window: W.
      part: the number of tokens of a part.
    """

    first: Any
    lane: Array
    n: Array
    window: int
    part: int

    @property
    def start_inside(self) -> bool:
        """True if documents may start inside of a block."""
        return self.part % self.window != 0

    def first_of(self, row: int) -> Array:
        """Returns the place of the first token of the document of a row of the block. Place 0 is
        the first token of the block, so the previous block has negative places.
        """
        begin = self.n * self.window
        return self.first[self.lane, jax.lax.div(begin + row, jnp.int32(self.part))] - begin
