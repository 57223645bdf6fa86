"""An example of a layer kind whose state changes with every token: a recurrence over tokens."""

import dataclasses
from typing import ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

import brt
from brt.config import Kernels, Model
from brt.config.fields import adaptable
from brt.config.kinds import KindSection
from brt.layers.basic import ONES, parameter
from brt.layers.kinds import LayerKind
from brt.layers.state import Given, LayerOutput, state_array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decay(KindSection):
    """The section of this layer kind in .gin files; its state is a decaying sum of all tokens."""

    kind: ClassVar[str] = "decay"
    any_window: ClassVar[bool] = True

    layers: tuple[int, ...] = adaptable(())


class DecayState(NamedTuple):
    total: jax.Array  # [B, D], float32, because it sums over many tokens


class DecayLayer(nn.Module):
    """Computes y_t = x_t + w s_t, where the state is s_t = s_(t-1) / 2 + x_t."""

    model: Model
    training: bool = False
    kernels: Kernels = Kernels()

    def setup(self) -> None:
        self.weight = parameter(self, "weight", (self.model.model_dim,), ("embed",), ONES)

    def __call__(self, x: jax.Array, given: Given) -> LayerOutput:
        length = x.shape[1] // given.document_start.shape[1]
        starts = jnp.zeros(x.shape[:2], bool).at[:, ::length].set(given.document_start)

        def step(total: jax.Array, token: tuple) -> tuple:
            total = jnp.where(token[1][:, None], 0, total) / 2 + token[0]
            return total, total

        total, sums = jax.lax.scan(step, given.state.total, (x.swapaxes(0, 1), starts.T))
        y = x + sums.swapaxes(0, 1) * self.weight[None, None]
        return LayerOutput(y.astype(x.dtype), DecayState(total))

    def begin_block(self, x: None, given: Given) -> LayerOutput:
        """Starts a block with the state so far, which `decode_step` changes with every token."""
        return LayerOutput(x, given.state)

    def decode_step(self, x: jax.Array, given: Given) -> LayerOutput:
        total = given.block.total / 2 + x[:, 0]
        y = x + (total * self.weight[None])[:, None]
        return LayerOutput(y.astype(x.dtype), DecayState(total))

    def end_block(self, x: None, given: Given) -> LayerOutput:
        return LayerOutput(x, given.block)


DECAY = LayerKind(
    DecayLayer,
    lambda model: DecayState(state_array((model.model_dim,), (None,), "float32")),
    parts={"state": ("total",)},
    flops=lambda model: 2 * model.model_dim,
    section=Decay,
)
brt.register_kind("decay", DECAY)
