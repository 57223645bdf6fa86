"""An example of a layer kind in a user's file: `echo` adds a decaying sum of earlier blocks."""

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
class Echo(KindSection):
    """The section of this layer kind in .gin files, such as `Echo.layers = (1,)`."""

    kind: ClassVar[str] = "echo"

    layers: tuple[int, ...] = adaptable(())  # indices of the layers of this kind
    decay: float = adaptable(0.5)  # the factor by which the sum shrinks in every block


class EchoState(NamedTuple):
    total: jax.Array  # [B, D], float32, the decaying sum of the mean vectors of earlier blocks


class EchoLayer(nn.Module):
    """Adds the decaying sum of earlier blocks' mean vectors to every token."""

    model: Model
    training: bool = False
    kernels: Kernels = Kernels()

    def setup(self) -> None:
        self.weight = parameter(self, "weight", (self.model.model_dim,), ("embed",), ONES)

    def __call__(self, x: jax.Array, given: Given) -> LayerOutput:
        decay, blocks = self.model.of(Echo).decay, given.document_start.shape[1]
        means = x.reshape(len(x), blocks, -1, x.shape[-1]).mean(axis=2)

        def step(total: jax.Array, block: tuple) -> tuple:
            mean, start = block
            total = jnp.where(start[:, None], 0, total)
            return decay * total + mean, total

        total, before = jax.lax.scan(
            step, given.state.total, (means.swapaxes(0, 1), given.document_start.T)
        )
        echo = jnp.repeat(before.swapaxes(0, 1), x.shape[1] // blocks, axis=1)
        y = x + echo * self.weight[None, None]
        return LayerOutput(y.astype(x.dtype), EchoState(total))

    def begin_block(self, x: None, given: Given) -> LayerOutput:
        return LayerOutput(x, jnp.zeros_like(given.state.total))

    def decode_step(self, x: jax.Array, given: Given) -> LayerOutput:
        echo = given.state.total * self.weight[None]
        y = (x + echo[:, None]).astype(x.dtype)
        return LayerOutput(y, given.block + x[:, 0] / self.model.block_length)

    def end_block(self, x: None, given: Given) -> LayerOutput:
        return LayerOutput(
            x, EchoState(self.model.of(Echo).decay * given.state.total + given.block)
        )


ECHO = LayerKind(
    EchoLayer,
    lambda model: EchoState(state_array((model.model_dim,), (None,), "float32")),
    parts={"state": ("total",)},
    flops=lambda model: 2 * model.model_dim,
    section=Echo,
)
brt.register_kind("echo", ECHO)
