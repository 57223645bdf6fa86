"""Tuples of the inputs and the gradients of the TPU kernels of window attention.

A field is a reference to an array in a kernel, and an array or a block spec where a kernel is
called. The module `pallas_tpu` describes the algorithm. A row is a query; its W keys, of its own
block of W tokens and of the block before, are in W slots, and a tile has R rows.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array


class WindowBlocks(NamedTuple):
    """The keys, or the values, that the queries of a block may see; each field is [W, K]."""

    cached: Any  # Those of the cached block, which is the block before the segment.
    before: Any  # Those of the previous block, if that block is in the segment.
    own: Any  # Those of the block that is being processed.

    def previous_and_own(self, first: Array) -> tuple[Array, Array]:
        """Returns the arrays of the previous block and of the block that is processed.

        `first` is True for the first block of a segment, whose previous block is the cached one.
        """
        return jax.lax.select(first, self.cached[...], self.before[...]), self.own[...]


class WindowKernelInputs(NamedTuple):
    """Inputs of a step of the grid, for one block of one head and one row of the batch.

    An input that is not needed is None.
    """

    q: Any  # The queries of the block [W, K].
    keys: WindowBlocks
    values: WindowBlocks
    # The norm to which the queries are scaled if the kernel normalizes queries and keys, repeated
    # over the width of a vector register [1, 128].
    scale: Any = None
    tile: Any = None  # The bias of each slot for the first R rows of a block [W, R].
    dropout: Any = None  # The mask of the weights that dropout keeps, packed by `dropout_bits`.
    # The following fields are for the backward pass only.
    gradient: Any = None  # The gradient of the output [W, K].
    lse: Any = None  # The log-sum-exp of each row's logits [1, W], as integers with the same bits.
    # The number that the gradient of the softmax subtracts for each row [1, W]: the sum over the
    # keys of the weight times the weight's gradient, minus the gradient of `lse`.
    along: Any = None


class WindowKernelGradients(NamedTuple):
    """Gradients that a step of the backward kernel writes."""

    q: Any  # The gradient of the block's queries [W, K].
    keys: Any  # The gradient of the block's keys [W, K].
    values: Any  # The gradient of the block's values [W, K].
    # The step of the first block writes the gradients of the cached keys and values [W, K]. If the
    # kernel normalizes keys, `cached_keys` is the gradient of the normalized keys.
    cached_keys: Any
    cached_values: Any
    # The gradients of `WindowKernelInputs.scale` and `WindowKernelInputs.tile` are float32 sums
    # over all steps of a head; None if the input is None.
    scale: Any
    tile: Any


class BlockDocuments(NamedTuple):
    """The starts of the documents of the block that a step of the grid processes.

    A segment is split into D parts of equal length, and documents start only at starts of parts. A
    place is the index of a token in the segment; cached tokens have negative places.
    """

    first: Any  # The place of the first token of each part's document, for all rows [B, D].
    lane: Array  # The index of the row of the batch.
    n: Array  # The index of the block.
    window: int  # The number W of tokens of a block.
    part: int  # The number of tokens of a part.

    @property
    def start_inside(self) -> bool:
        """True if documents may start inside of a block."""
        return self.part % self.window != 0

    def document_start(self, row: int) -> Array:
        """Returns where the document of a row of the block starts, relative to the block's start.

        The result is negative if the document starts before the block.
        """
        begin = self.n * self.window
        return self.first[self.lane, jax.lax.div(begin + row, jnp.int32(self.part))] - begin
