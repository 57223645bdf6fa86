"""The sliding-window layer of Transformer-XL: each block attends to itself and to a cache of the
previous block.
"""

from typing import Any

import flax.linen as nn
from jaxtyping import Array, Bool, Float, Int

from brt.config import Kernels, Model
from brt.layers.attention import TransformerBlock
from brt.layers.cache import closed_window, with_cache
from brt.layers.state import LayerOutput, LocalState, OpenBlock, WindowState, open_block
from brt.layers.taps import NO_TAPS, TokenTaps
from brt.ops.recurrent_attention import StateKV


class WindowLayer(nn.Module):
    """A sliding-window layer."""

    model: Model
    training: bool = False
    kernels: Kernels = Kernels()

    def setup(self) -> None:
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
        """Reads a segment; with `taps`, a single block."""
        taps = taps or NO_TAPS
        projections = self.tokens.project(x, taps)
        past, after = with_cache(self.model, state, projections, document_start)
        return LayerOutput(self.tokens.attend(x, projections, past, feedback, taps=taps), after)

    def begin_block(self, x: None, *, state: WindowState | LocalState, **_: Any) -> LayerOutput:
        """Returns, as the state of the output, an open block without tokens."""
        return LayerOutput(x, open_block(state))

    def decode_step(
        self,
        x: Float[Array, "B 1 D"],
        *,
        state: WindowState | LocalState,
        block: OpenBlock,
        position: Int[Array, ""],
        feedback: StateKV | None = None,
        **_: Any,
    ) -> LayerOutput:
        """Reads one token and returns its output and the open block."""
        return LayerOutput(*self.tokens.attend_step(x, state, block, position, feedback))

    def end_block(
        self, x: None, *, state: WindowState | LocalState, block: OpenBlock, **_: Any
    ) -> LayerOutput:
        """Returns, in the output, the layer's state after a full block."""
        return LayerOutput(x, closed_window(self.model, state, block))
