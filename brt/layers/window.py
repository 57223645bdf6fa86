"""The sliding-window layer of Transformer-XL: each block attends to itself and to a cache of the
previous block.

In shapes, B is the number of rows of the batch, T the number of tokens of a segment, N the number
of its blocks, and D the width of the model.
"""

from typing import Any

import flax.linen as nn
from jaxtyping import Array, Bool, Float, Int

from brt.config import Kernels, Model
from brt.layers.attention import Mix, TransformerBlock
from brt.layers.cache import closed_window, with_cache
from brt.layers.state import LayerOutput, LocalState, OpenBlock, WindowState, open_block
from brt.layers.taps import NO_TAPS, TokenTaps
from brt.ops.recurrent_attention import StateKV


class WindowLayer(nn.Module):
    """A sliding-window layer: causal attention of each token to its window, followed by an MLP.

    Layers whose tokens also attend to keys beyond the window are subclasses. A subclass defines
    `mix_step`, `__call__` and `end_block`, and inherits `begin_block` and `decode_step`.

    Attributes:
      model: the settings of the model, as the layer sees them (`Model.for_layer`).
      training: True applies dropout.
      kernels: the names of the implementations of ops.
    """

    model: Model
    training: bool = False
    kernels: Kernels = Kernels()

    def setup(self) -> None:
        """Creates the module with attention and the MLP."""
        self.tokens = TransformerBlock(
            self.model, cross_attends=self.model.feedback, training=self.training,
            kernels=self.kernels,
        )  # fmt: skip

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        state: WindowState | LocalState,
        document_start: Bool[Array, "B N"],
        feedback: StateKV | None = None,
        taps: TokenTaps | None = None,
        **_: Any,
    ) -> LayerOutput:
        """Reads a segment and returns the outputs of its tokens and the state after the segment.

        Args:
          x: the input vectors of the tokens of a segment with N blocks.
          state: the state before the segment.
          document_start: True where a block is the first of a document.
          feedback: keys and values of recurrent states that the tokens also attend to, or None.
          taps: accumulators of weight gradients that are computed after a scan over blocks; the
            segment is then a single block. None for segments of all blocks.
        """
        taps = taps or NO_TAPS
        projections = self.tokens.project(x, taps)
        past, after = with_cache(self.model, state, projections, document_start)
        return LayerOutput(self.tokens.attend(projections, past, feedback, taps=taps), after)

    def mix_step(self, state: Any, position: Int[Array, ""]) -> Mix | None:
        """Returns the function that adds attention to keys beyond the window to the attention of
        one token, or None if the layer has no such keys. Subclasses with such keys override this
        method.

        Args:
          state: the layer's state after the previous block.
          position: the position of the token in its block.
        """
        return None

    def begin_block(self, x: None, *, state: Any, **_: Any) -> LayerOutput:
        """Returns an open block (the data of a block that is read token by token) without tokens.

        Args:
          x: None, which is returned as the output; a block begins without a token.
          state: the state after the previous block. In subclasses, it has the cache of keys and
            values in its field `window`.

        Returns:
          The open block, as the state of the `LayerOutput`.
        """
        return LayerOutput(x, open_block(_cache_of(state)))

    def prepare_block(
        self, x: None, *, block: OpenBlock, position: Int[Array, ""], **_: Any
    ) -> LayerOutput:
        """Returns the open block with the keys and values in the form in which attention reads
        them, before several tokens are read one by one.

        Args:
          x: None, which is returned as the output.
          block: the open block.
          position: the number of tokens of the block that have been read.
        """
        return LayerOutput(x, self.tokens.prepared(block, position))

    def decode_step(
        self,
        x: Float[Array, "B T D"],
        *,
        state: Any,
        block: OpenBlock,
        position: Int[Array, ""],
        feedback: StateKV | None = None,
        **_: Any,
    ) -> LayerOutput:
        """Reads T tokens of a block, whose keys and values enter the open block. The state does not
        change. In subclasses with `mix_step`, T is 1.

        Args:
          x: the input vectors of the tokens.
          state: the layer's state after the previous block.
          block: the open block, which has the keys and values of the block's earlier tokens.
          position: the position of the first of these tokens in the block.
          feedback: the keys and values of recurrent states that the tokens also attend to, or None.

        Returns:
          The output vectors of the tokens; and the open block with the tokens added, as the state
          of the `LayerOutput`.
        """
        cache, mix = _cache_of(state), self.mix_step(state, position)
        return LayerOutput(*self.tokens.attend_step(x, cache, block, position, feedback, mix))

    def end_block(self, x: None, *, state: Any, block: OpenBlock, **_: Any) -> LayerOutput:
        """Returns the layer's state after a full block, which becomes the cache.

        Args:
          x: None, which is returned as the output.
          state: the layer's state after the previous block.
          block: the open block, which has the keys and values of all tokens of the block.

        Returns:
          The new state, as the state of the `LayerOutput`.
        """
        return LayerOutput(x, closed_window(self.model, state, block))


def _cache_of(state: Any) -> WindowState | LocalState:
    """Returns the cache of keys and values of a layer's state."""
    return state if isinstance(state, (WindowState, LocalState)) else state.window
