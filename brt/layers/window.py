"""The sliding-window layer of Transformer-XL: each block attends to itself and to a cache of the
previous block. The letters of shapes are those of `brt.layers.state`.
"""

from typing import Any

import flax.linen as nn
from jaxtyping import Array, Bool, Float, Int

from brt.config import Kernels, Model
from brt.layers.attention import Mix, TransformerBlock
from brt.layers.cache import closed_window, with_cache
from brt.layers.state import LayerOutput, LocalState, OpenBlock, WindowState, open_block
from brt.ops.recurrent_attention import StateKV


class WindowLayer(nn.Module):
    """A sliding-window layer: causal attention of each token to its window, followed by an MLP.

    Layers whose tokens also attend to keys beyond the window are subclasses. A subclass defines
    `mix_step`, `__call__` and `end_block`, inherits `begin_block` and `decode_step`, and has the
    cache in the field `window` of its state.
    """

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
        **_: Any,
    ) -> LayerOutput:
        projections = self.tokens.project(x)
        past, after = with_cache(self.model, state, projections, document_start)
        return LayerOutput(self.tokens.attend(projections, past, feedback), after)

    def mix_step(self, state: Any, position: Int[Array, ""]) -> Mix | None:
        """Returns the function that adds attention to keys beyond the window to that of one token,
        or None if the layer has no such keys. `state` is the state after the previous block.
        """
        return None

    def begin_block(self, x: None, *, state: Any, **_: Any) -> LayerOutput:
        return LayerOutput(x, open_block(_cache_of(state)))

    def prepare_block(
        self, x: None, *, block: OpenBlock, position: Int[Array, ""], **_: Any
    ) -> LayerOutput:
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
        cache, mix = _cache_of(state), self.mix_step(state, position)
        return LayerOutput(*self.tokens.attend_step(x, cache, block, position, feedback, mix))

    def end_block(self, x: None, *, state: Any, block: OpenBlock, **_: Any) -> LayerOutput:
        return LayerOutput(x, closed_window(self.model, state, block))


def _cache_of(state: Any) -> WindowState | LocalState:
    return state if isinstance(state, (WindowState, LocalState)) else state.window
