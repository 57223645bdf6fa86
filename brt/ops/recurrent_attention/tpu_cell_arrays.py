"""Inputs and outputs of the kernels of the complete cell, or their block specs; see `tpu_cell`."""

from typing import Any, NamedTuple

import jax
from jaxtyping import Array


class BlockFlags(NamedTuple):
    """Flags [B, N] of all lanes and blocks.

    Attributes:
      cache_mask: not zero where a block may read the tokens of the block before it.
      starts: not zero where a document starts.
    """

    cache_mask: Any
    starts: Any


class CellKernelWeights(NamedTuple):
    """Weights of the cell; arrays that differ by head are those of one head.

    Attributes:
      norm, gate: [1, D].
      projection: four arrays [D, K], for keys, both kinds of queries, and values.
      output: [2, K, D].
      scales: [2, 128].
      ids, initial: [S, D], in the forward pass only.
    """

    norm: Any
    gate: Any
    projection: Any
    output: Any
    scales: Any
    ids: Any = None
    initial: Any = None


class TokenBlocks(NamedTuple):
    """Keys or values of the tokens for one head, each [W, K].

    Attributes:
      cached: those of the cache.
      before: those of the block before.
      own: those of this block.
    """

    cached: Any
    before: Any
    own: Any

    def both(self, first: Array) -> tuple[Array, Any]:
        """Returns those of the previous block and of this block.

        Args:
          first: True for the first block of the segment, whose previous block is in the cache.
        """
        return jax.lax.select(first, self.cached[...], self.before[...]), self.own


class CellResiduals(NamedTuple):
    """Arrays of a block that the backward pass reads.

    Attributes:
      vectors: [S, D], float32, the states before the block.
      hidden: [S, D], the input of the projection, from which only the weight gradient is computed.
      projected: [4, S, K], keys, both kinds of queries, and values of the states.
      y: [2, S, K], outputs of both attentions.
      lse: [2, 1, S], log-sum-exp of both attentions.
    """

    vectors: Any
    hidden: Any
    projected: Any
    y: Any
    lse: Any


class ShownStates(NamedTuple):
    """State keys and values [S, K] before a block, which the tokens of the block read."""

    keys: Any
    values: Any


class CellKernelSums(NamedTuple):
    """Sums that stay in VMEM over the blocks of a lane, in the backward pass.

    Attributes:
      carry: [S, D], the gradient of the states.
      after: [S, D], the states after the block.
      hidden: [S, D], the gradient of the projection's input.
      read: [2, S, K], the gradient of the attention outputs.
      attended: two arrays [S + 2 W, K], gradients of keys and of values.
      behind: two arrays [H, W, K], gradients of this block's tokens from the next block.
    """

    carry: Any
    after: Any
    hidden: Any
    read: Any
    attended: tuple[Any, Any]
    behind: tuple[Any, Any]


class CellKernelGradients(NamedTuple):
    """Gradients that the backward kernel writes for a step, block or lane.

    Attributes:
      projected: [4, S, K].
      update: [S, D], the gradient of the output projection.
      keys, values: two arrays [W, K], of cached tokens and of this block's tokens.
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
