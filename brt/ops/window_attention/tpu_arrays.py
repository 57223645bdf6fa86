"""Tuples of the inputs and the gradients of the TPU kernels of window attention.

A field of a tuple is a reference to an array in a kernel; where a kernel is called, it is an array
or a block spec. The module `pallas_tpu` describes the algorithm. A row is a query. A row sees W
keys, which are in its own block of W tokens and in the block before, and the kernels keep them in W
slots: slot c of a row is key c of the row's own block if the row sees this key, and otherwise key c
of the previous block. Logits are matrices of slots x rows.

In shapes, W is the number of tokens of a block and of a window, K the size of a head, and R the
number of rows of a tile.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array


class WindowBlocks(NamedTuple):
    """The keys, or the values, that the queries of a block may see; each field is [W, K].

    Attributes:
      cached: the keys or values of the cached block, which is the block before the segment.
      before: the keys or values of the previous block, if that block is in the segment.
      own: the keys or values of the block that is being processed.
    """

    cached: Any
    before: Any
    own: Any

    def previous_and_own(self, first: Array) -> tuple[Array, Array]:
        """Returns the keys (or values) of the previous block and of the block being processed.

        `first` is True if the block being processed is the first block of the segment. The previous
        block is then the cached block.
        """
        return jax.lax.select(first, self.cached[...], self.before[...]), self.own[...]


class WindowKernelInputs(NamedTuple):
    """Inputs of a step of the grid, which processes one block for one head and one lane (row of the
    batch). An input that is not needed is None.

    Only the backward pass has the fields `gradient`, `lse` and `along`.

    Attributes:
      q: [W, K], queries of the block.
      keys, values: the keys and values of the previous block and of this block.
      scale: [1, 128], the norm to which the queries are scaled if the kernel normalizes queries and
        keys, repeated over the width of a vector register.
      tile: [W, R], the bias of each slot for the first R rows of a block.
      dropout: the mask of the weights that dropout keeps, slots x rows, packed by `dropout_bits`.
      gradient: [W, K], gradient of the output.
      lse: [1, W], the log-sum-exp of each row's logits, as unsigned integers with the same bits.
      along: [1, W], for each row the number that the gradient of the softmax subtracts: the sum
        over the keys of the weight times the weight's gradient, minus the gradient of `lse`.
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
      keys, values: [W, K], the gradients of the block's keys and values.
      cached_keys, cached_values: [W, K], the gradients of the cached keys and values, which the
        step of the first block writes. If the kernel normalizes keys, these are the gradients of
        the normalized keys.
      scale, tile: float32 [1, 128] and [W, R], the gradients of `WindowKernelInputs.scale` and
        `WindowKernelInputs.tile`, summed over all steps of a head; None if the input is None.
    """

    q: Any
    keys: Any
    values: Any
    cached_keys: Any
    cached_values: Any
    scale: Any
    tile: Any


class BlockDocuments(NamedTuple):
    """The starts of the documents of the block that a step of the grid processes.

    A segment is split into D parts of equal length, and documents start only at starts of parts. A
    place is the index of a token in the segment; cached tokens have negative places.

    Attributes:
      first: [B, D], for each lane and part, the place of the first token of the part's document.
      lane, n: the indices of the lane (row of the batch) and of the block that the step processes.
      window: W, the number of tokens of a block.
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

    def document_start(self, row: int) -> Array:
        """Returns where the document of a row of the block starts, counted from the start of the
        block.

        The result is negative if the document starts before the block. `row` is the index of the
        row in the block.
        """
        begin = self.n * self.window
        return self.first[self.lane, jax.lax.div(begin + row, jnp.int32(self.part))] - begin
