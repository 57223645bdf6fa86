"""Named tuples for the inputs and outputs of the kernels of the complete recurrent cell.

Their fields hold arrays outside of a kernel, references to a grid step's part of the arrays inside
of a kernel, or the block specs that select these parts. The module `tpu_cell` describes the
algorithm.

The shapes are the shapes that a grid step sees: B is the number of lanes (rows of the batch), N of
blocks of a segment, W of tokens of a block, S of states, D of numbers of a state, H of heads, and K
of numbers of a head.
"""

from typing import Any, NamedTuple

import jax
from jaxtyping import Array


class BlockFlags(NamedTuple):
    """Integer flags [B, N] for all lanes and blocks.

    Attributes:
      cache_mask: not zero where a block may read the tokens of the previous block.
      starts: not zero where a document starts.
    """

    cache_mask: Any
    starts: Any


class CellKernelWeights(NamedTuple):
    """Weights of the cell that a step of the grid reads, which computes one head.

    Attributes:
      norm: [1, D], scale of the norm before the projections.
      gate: [1, D], bias of the fixed gate.
      projection: four arrays [D, K], for keys, queries to states, queries to tokens, and values.
      output: [2, K, D], projection of both attention outputs.
      scales: [2, 128], the factors of the queries to states and of the queries to tokens, each
        repeated along the lanes of a register.
      ids: [S, D], learned identities of the states; None in the backward pass.
      initial: [S, D], the states at the start of a document; None in the backward pass.
    """

    norm: Any
    gate: Any
    projection: Any
    output: Any
    scales: Any
    ids: Any = None
    initial: Any = None


class TokenBlocks(NamedTuple):
    """Keys, or values, of the tokens that a grid step reads, for one head; each field is [W, K].

    Attributes:
      cached: the tokens of the cached block, which is the block before the segment.
      before: the tokens of the previous block, if that block is in the segment.
      own: the tokens of the block that is being processed.
    """

    cached: Any
    before: Any
    own: Any

    def previous_and_own(self, first: Array) -> tuple[Array, Any]:
        """Returns the keys, or values, of the previous block as an array, and the keys, or values,
        of this block as a reference (`own`), which has not been loaded yet.

        Args:
          first: True for the first block of the segment, whose previous block is in the cache.
        """
        return jax.lax.select(first, self.cached[...], self.before[...]), self.own


class CellResiduals(NamedTuple):
    """Arrays of a block that the forward pass saves for the backward pass.

    Attributes:
      vectors: [S, D], float32, the states before the block.
      hidden: [S, D], the input of the projection, from which only the weight gradient is computed.
      projected: [4, S, K], keys, queries to states, queries to tokens, and values of the states.
      y: [2, S, K], outputs of the attention to the states and of the attention to the tokens.
      lse: [2, 1, S], log-sum-exps of both attentions, in the same order.
    """

    vectors: Any
    hidden: Any
    projected: Any
    y: Any
    lse: Any


class BlockStateKV(NamedTuple):
    """State keys and values [S, K] before a block, which the tokens of the block read."""

    keys: Any
    values: Any


class CellKernelSums(NamedTuple):
    """Scratch memory of the backward kernel.

    The fields `carry`, `after` and `from_next_block` pass arrays from a block to the block before
    it, `hidden` is a sum over the heads of a block, and each step overwrites `read` and `attended`.

    Attributes:
      carry: [S, D], the gradient of the states after the block.
      after: [S, D], the states after the block.
      hidden: [S, D], the gradient of the normalised states, from which the states' keys, queries
        and values are projected.
      read: [2, S, K], the gradients of the outputs of both attentions of a head: to the states, and
        to the tokens.
      attended: two arrays [S + 2 W, K], the gradients of the keys and of the values of a head: S
        rows of the states, W of the previous block's tokens, and W of this block's tokens.
      from_next_block: two arrays [H, W, K], the contributions of the next block to the gradients of
        this block's keys and values.
    """

    carry: Any
    after: Any
    hidden: Any
    read: Any
    attended: tuple[Any, Any]
    from_next_block: tuple[Any, Any]


class CellKernelGradients(NamedTuple):
    """Gradients that the backward kernel writes.

    Attributes:
      projected: [4, S, K], for one head of a block: the gradients of keys, queries to states,
        queries to tokens, and values of the states.
      update: [S, D], for one block: the gradient of the output projection's result.
      keys, values: two arrays [W, K] each, for one head: the gradients for the cached tokens and
        for this block's tokens.
      vectors: [S, D], for one lane: the gradient of the states before the segment. Every block
        overwrites this array, and the first block of the segment is the last to do so.
      initial: [S, D], a sum over the blocks of a lane: the gradient of the states at the start of a
        document.
      ids: [S, D], a sum over the blocks of a lane: the gradient of the learned identities of the
        states.
      norm, gate: [1, D], sums over the blocks and states of a lane: the gradients of the norm's
        scale and of the gate's bias.
      scales: [2, 128], for one head of a block: the gradients of `CellKernelWeights.scales`.
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
