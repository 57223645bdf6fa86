"""The sliding-window layer of Transformer-XL: each block attends to itself and to a cache of the
previous block.
"""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.config import Kernels, Model
from brt.layers.attention import TransformerBlock, with_cache
from brt.layers.state import OpenBlock, WindowState
from brt.layers.taps import NO_TAPS, TokenTaps
from brt.ops.recurrent_attention import StateKV


class WindowLayer(nn.Module):
    """A sliding-window layer: (x, state) -> (y, state)."""

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
        state: WindowState,
        document_start: Bool[Array, "B N"],
        feedback: StateKV | None = None,
        taps: TokenTaps = NO_TAPS,
    ) -> tuple[Float[Array, "B T D"], WindowState]:
        """Reads a segment; with `taps`, a single block."""
        projections = self.tokens.project(x, taps)
        past, state = with_cache(
            self.model, state, projections, document_start, as_they_are=self.model.feedback
        )
        return self.tokens.attend(x, projections, past, feedback, taps=taps), state

    def begin_block(self, x: None, state: WindowState, *_: None) -> tuple[None, OpenBlock]:
        """Returns an empty open block behind `state`."""
        return x, OpenBlock(state.keys, state.values, None)

    def decode_step(
        self,
        x: Float[Array, "B 1 D"],
        carried: tuple[WindowState, OpenBlock],
        position: Int[Array, ""],
        feedback: StateKV | None = None,
    ) -> tuple[Float[Array, "B 1 D"], OpenBlock]:
        """Reads one token of the open block."""
        return self.tokens.attend_step(x, *carried, position, feedback)

    def end_block(
        self, x: None, carried: tuple[WindowState, OpenBlock], *_: None
    ) -> tuple[None, WindowState]:
        """Returns the state after a full block."""
        state, block = carried
        return x, WindowState(block.keys, block.values, jnp.ones_like(state.valid))
