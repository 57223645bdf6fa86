"""A layer with the recurrent block of Griffin (De et al. 2024) in place of attention: the RG-LRU, a
gated linear recurrence over tokens.

In shapes, R is the number of channels of a head, and L of earlier tokens that the convolution
reads. The other letters of shapes are those of `brt.layers.state`.
"""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from brt.config import Model
from brt.distributed.rules import constrain
from brt.layers.basic import (
    FROM_HEADS,
    INTO_HEADS,
    ZEROS,
    dropout,
    kernel_init,
    norm_parameter,
    normed,
    parameter,
)
from brt.layers.flops import mlp_flops
from brt.layers.mlp import MLP
from brt.layers.state import LayerOutput
from brt.memories.convolution import (
    CONVOLVED,
    convolution,
    convolution_step,
    tokens_since_start,
)
from brt.memories.rg_lru.recurrence import SHARPNESS, GateParameters, recurrence_coefficients, scan
from brt.memories.rg_lru.section import RGLRU
from brt.memories.token_state import TokenStateLayer
from brt.ops.dense import dense

# With every token, the hidden state of a channel is multiplied by a factor. The parameter `rate` of
# a new layer is drawn so that this factor is between these two numbers while the gate is open.
_SLOWEST, _FASTEST = 0.999, 0.9


class RGLRUState(NamedTuple):
    """The float32 hidden states, and the last L = `CONVOLVED` - 1 inputs of the convolution."""

    hidden: Float[Array, "B H R"]
    inputs: Float[Array, "B L H R"]


def new_state(model: Model, batch: int, dtype: jnp.dtype) -> RGLRUState:
    channels = _channels(model)
    return RGLRUState(
        jnp.zeros((batch, *channels), jnp.float32),
        jnp.zeros((batch, CONVOLVED - 1, *channels), dtype),
    )


def state_axes(model: Model) -> RGLRUState:
    axes: Any = ("lanes", "heads", None), ("lanes", None, "heads", None)
    return RGLRUState(*axes)


def rg_lru_flops(model: Model) -> int:
    """Returns the FLOPs per token of three projections, two gates of each head, the convolution,
    and the MLP. The recurrence itself has no matrix products and is not counted.
    """
    heads, size = _channels(model)
    width = heads * size
    block = 6 * model.model_dim * width + 4 * width * size + 2 * CONVOLVED * width
    return block + mlp_flops(model)


def _channels(model: Model) -> tuple[int, int]:
    # Returns the number of heads, and the number of channels of a head.
    return model.heads, model.of(RGLRU).width_of(model) // model.heads


def _rate_init(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    # With these rates, the factor of a state is between `_FASTEST` and `_SLOWEST` while the gate is
    # open (Griffin, section 2.4).
    drawn = jax.random.uniform(key, shape, dtype, _FASTEST**2, _SLOWEST**2)
    return jnp.log(jnp.expm1(-0.5 * jnp.log(drawn) / SHARPNESS))


class RGLRULayer(TokenStateLayer):
    """A layer with a gated recurrence over tokens, in place of attention, and an MLP.

    The normalized inputs pass through two branches: a GELU, and a convolution followed by the
    recurrence. The product of both branches is projected to the width of the model and added to the
    inputs of the layer (a residual connection), and the MLP follows.
    """

    def setup(self) -> None:
        m = self.model
        channels = _channels(m)
        self.norm = norm_parameter(self, m, "norm")
        self.branch = parameter(self, "branch", (m.model_dim, *channels), INTO_HEADS)
        self.input = parameter(self, "input", (m.model_dim, *channels), INTO_HEADS)
        self.convolution = parameter(
            self, "convolution", (CONVOLVED, *channels), ("stack", "heads", "head_dim"),
            nn.initializers.normal(CONVOLVED**-0.5),
        )  # fmt: skip
        gate, axes = (*channels, channels[1]), ("heads", "head_dim", None)
        for name in ("input_gate", "recurrence_gate"):
            init = nn.initializers.normal(channels[1] ** -0.5)
            setattr(self, name, parameter(self, name, gate, axes, init))
            bias = parameter(self, f"{name}_bias", channels, ("heads", "head_dim"), ZEROS)
            setattr(self, f"{name}_bias", bias)
        self.rate = parameter(self, "rate", channels, ("heads", "head_dim"), _rate_init)
        self.output = parameter(
            self, "output", (1, *channels, m.model_dim), FROM_HEADS, kernel_init(inputs=3)
        )
        self.mlp = MLP(m, self.training)
        nn.share_scope(self, self.mlp)  # The MLP's parameters become parameters of this module.

    def __call__(
        self, x: Float[Array, "B T D"], *, state: RGLRUState, document_start: Bool[Array, "B N"],
        **_: Any,
    ) -> LayerOutput:  # fmt: skip
        since_start = tokens_since_start(document_start, x.shape[1])
        branch, inputs = self._project(x)
        convolved, last = convolution(inputs, state.inputs, self.convolution, since_start)
        a, b = self._steps(convolved)
        a = jnp.where((since_start == 0)[:, :, None, None], 0, a)
        hidden = scan(a, b, state.hidden)
        return LayerOutput(self._finish(x, branch, hidden), RGLRUState(hidden[:, -1], last))

    def decode_step(self, x: Float[Array, "B 1 D"], *, block: RGLRUState, **_: Any) -> LayerOutput:
        branch, inputs = self._project(x)
        convolved, last = convolution_step(inputs, block.inputs, self.convolution)
        a, b = self._steps(convolved)
        hidden = a[:, 0] * block.hidden + b[:, 0]
        y = self._finish(x, branch, hidden[:, None])
        return LayerOutput(y, RGLRUState(hidden, last))

    def _project(self, x: Float[Array, "B T D"]) -> tuple[Array, Array]:
        h = dropout(self, normed(self.model, x, self.norm), self.model.dropout)
        branch, inputs = (
            constrain(dense(h, kernel), "lanes", None, "heads", None)
            for kernel in (self.branch, self.input)
        )
        return jax.nn.gelu(branch, approximate=True), inputs

    def _steps(self, x: Float[Array, "B T H R"]) -> tuple[Array, Array]:
        gates = GateParameters(
            self.input_gate, self.input_gate_bias, self.recurrence_gate,
            self.recurrence_gate_bias, self.rate,
        )  # fmt: skip
        return recurrence_coefficients(x, gates)

    def _finish(
        self, x: Float[Array, "B T D"], branch: Array, hidden: Float[Array, "B T H R"]
    ) -> Float[Array, "B T D"]:
        y = dense(branch * hidden.astype(branch.dtype), self.output[0], inputs=2)
        return self.mlp(x + dropout(self, y, self.model.dropout), None)
