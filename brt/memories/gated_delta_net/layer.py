"""Layers with the memory of Gated DeltaNet, in place of attention or in addition to attention.

The memory of a head is a matrix, which every token changes and then reads (`memory.py`). The
letters of shapes are those of `brt.layers.state`.
"""

from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.config import Kernels, Model
from brt.layers.attention import TransformerBlock
from brt.layers.basic import dropout, norm_parameter, normed
from brt.layers.cache import closed_window, with_cache
from brt.layers.flops import mlp_flops, window_flops
from brt.layers.mlp import MLP
from brt.layers.state import (
    LayerOutput,
    LocalState,
    OpenBlock,
    WindowState,
    new_window_state,
    open_block,
    window_axes,
)
from brt.memories.convolution import tokens_since_start
from brt.memories.gated_delta_net.memory import (
    DeltaMemory,
    DeltaState,
    delta_axes,
    delta_flops,
    new_delta_state,
)
from brt.memories.token_state import TokenStateLayer
from brt.ops.recurrent_attention import StateKV


def gated_delta_net_flops(model: Model) -> int:
    return delta_flops(model) + mlp_flops(model)


class GatedDeltaNetLayer(TokenStateLayer):
    """A layer that consists of a norm, a `DeltaMemory` (in place of attention) and an MLP."""

    def setup(self) -> None:
        self.norm = norm_parameter(self, self.model, "norm")
        self.memory = DeltaMemory(self.model)
        self.mlp = MLP(self.model, self.training)
        nn.share_scope(self, self.mlp)  # The MLP's parameters become parameters of this module.

    def __call__(
        self, x: Float[Array, "B T D"], *, state: DeltaState, document_start: Bool[Array, "B N"],
        **_: Any,
    ) -> LayerOutput:  # fmt: skip
        since_start = tokens_since_start(document_start, x.shape[1])
        read, state = self.memory(self._normed(x), state, since_start)
        return LayerOutput(self._finish(x, read), state)

    def decode_step(self, x: Float[Array, "B 1 D"], *, block: DeltaState, **_: Any) -> LayerOutput:
        read, block = self.memory.read_token(self._normed(x), block)
        return LayerOutput(self._finish(x, read), block)

    def _normed(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return dropout(self, normed(self.model, x, self.norm), self.model.dropout)

    def _finish(self, x: Float[Array, "B T D"], read: Float[Array, "B T D"]) -> Array:
        return self.mlp(x + dropout(self, read, self.model.dropout), None)


class WindowDeltaState(NamedTuple):
    """The cache, and the fields of the memory's `DeltaState`."""

    window: WindowState | LocalState
    matrices: Float[Array, "B H K V"]
    inputs: Float[Array, "B L H R"]


class WindowDeltaBlock(NamedTuple):
    """The open block of a window, and the memory after the tokens that have been read so far."""

    window: OpenBlock
    memory: DeltaState


def new_window_delta_state(model: Model, batch: int, dtype: jnp.dtype) -> WindowDeltaState:
    window = new_window_state(model, batch, dtype)
    return WindowDeltaState(window, *new_delta_state(model, batch, dtype))


def window_delta_axes(model: Model) -> WindowDeltaState:
    return WindowDeltaState(window_axes(model), *delta_axes(model))


def window_delta_flops(model: Model) -> int:
    return window_flops(model) + delta_flops(model)


class WindowGatedDeltaNetLayer(nn.Module):
    """A sliding-window layer with a `DeltaMemory` in addition to its window. The output of the
    memory is added to the output of attention.

    The layer has all parameters of a sliding-window layer, under the same names. A new memory
    outputs zeros, so a layer that starts from the weights of a sliding-window layer computes the
    same as that layer until training changes the memory.
    """

    model: Model
    training: bool = False
    kernels: Kernels = Kernels()

    def setup(self) -> None:
        self.tokens = TransformerBlock(
            self.model, cross_attends=self.model.feedback, training=self.training,
            kernels=self.kernels,
        )  # fmt: skip
        self.memory = DeltaMemory(self.model, zero_output=True)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        state: WindowDeltaState,
        document_start: Bool[Array, "B N"],
        feedback: StateKV | None = None,
        **_: Any,
    ) -> LayerOutput:
        """Adds what the memory reads to the residual, so attention and MLP follow as usual."""
        since_start = tokens_since_start(document_start, x.shape[1])
        memory = DeltaState(state.matrices, state.inputs)
        read, memory = self.memory(self.tokens.normed(x), memory, since_start)
        projections = self.tokens.project(x)
        past, window = with_cache(self.model, state.window, projections, document_start)
        x = projections.residual + self._dropped(read)
        y = self.tokens.attend(projections, past, feedback, residual=x)
        return LayerOutput(y, WindowDeltaState(window, *memory))

    def begin_block(self, x: None, *, state: WindowDeltaState, **_: Any) -> LayerOutput:
        memory = DeltaState(state.matrices, state.inputs)
        return LayerOutput(x, WindowDeltaBlock(open_block(state.window), memory))

    def prepare_block(
        self, x: None, *, block: WindowDeltaBlock, position: Int[Array, ""], **_: Any
    ) -> LayerOutput:
        return LayerOutput(x, block._replace(window=self.tokens.prepared(block.window, position)))

    def decode_step(
        self,
        x: Float[Array, "B 1 D"],
        *,
        state: WindowDeltaState,
        block: WindowDeltaBlock,
        position: Int[Array, ""],
        feedback: StateKV | None = None,
        **_: Any,
    ) -> LayerOutput:
        read, memory = self.memory.read_token(self.tokens.normed(x), block.memory)
        projections = self.tokens.project(x)
        y, window = self.tokens.attend_step(
            x + self._dropped(read), state.window, block.window, position, feedback,
            projections=projections,
        )  # fmt: skip
        return LayerOutput(y, WindowDeltaBlock(window, memory))

    def end_block(
        self, x: None, *, state: WindowDeltaState, block: WindowDeltaBlock, **_: Any
    ) -> LayerOutput:
        window = closed_window(self.model, state.window, block.window)
        return LayerOutput(x, WindowDeltaState(window, *block.memory))

    def _dropped(self, read: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return dropout(self, read, self.model.dropout)
