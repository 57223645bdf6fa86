"""Layers with a gated linear recurrence over tokens, RG-LRU (Griffin, De et al. 2024, arXiv
2402.19427, section 2.4).

In shapes, R is the number of channels of a head, and L of earlier tokens that the convolution
reads. The other letters of shapes are those of `brt.layers.state`.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from brt.config import Model
from brt.config.checks import check
from brt.config.fields import adaptable
from brt.config.kinds import KindSection
from brt.distributed.rules import constrain
from brt.layers.basic import (
    FROM_HEADS,
    INTO_HEADS,
    MLP,
    ZEROS,
    kernel_init,
    mlp_flops,
    norm_parameters,
    parameter,
)
from brt.layers.kinds import LayerKind, register_kind
from brt.layers.sections import refuse_feedback
from brt.layers.state import Given, LayerOutput, state_array
from brt.memories.token_state import (
    CONVOLVED,
    TokenStateLayer,
    convolution,
    convolution_step,
    tokens_since_start,
)
from brt.ops.dense import dense
from brt.ops.products import einsum_float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class RGLRU(KindSection):
    """Settings of layers with a gated linear recurrence over tokens (Griffin, De et al. 2024)."""

    kind: ClassVar[str] = "rg_lru"
    any_window: ClassVar[bool] = True
    grouped_keys: ClassVar[bool] = True

    layers: tuple[int, ...] = adaptable(())  # The layers with these indices are of this kind.

    def check_model(self, model: Model) -> None:
        """Requires that `Model.heads` divides `model_dim`, and that `Model.feedback` is False."""
        check(
            not self.layers or model.model_dim % model.heads == 0,
            f"Model.model_dim = {model.model_dim} must be a multiple of Model.heads = "
            f"{model.heads}, because each head of the layers in RGLRU.layers has gates of its own",
        )
        refuse_feedback(model, "RGLRU.layers", self.layers)


SHARPNESS = 8.0  # This is the constant c of the paper's equation 3.


class GateParameters(NamedTuple):
    """Float32 kernels and biases of two gates, and `rate`. The input gate scales the inputs of the
    recurrence. The recurrence gate and `rate` determine how fast the state decays.
    """

    input: Float[Array, "H R R"]
    input_bias: Float[Array, "H R"]
    recurrence: Float[Array, "H R R"]
    recurrence_bias: Float[Array, "H R"]
    rate: Float[Array, "H R"]


def recurrence_coefficients(
    x: Float[Array, "B T H R"], gates: GateParameters
) -> tuple[Float[Array, "B T H R"], Float[Array, "B T H R"]]:
    """Returns the factors a and the summands b of the recurrence h_t = a_t h_(t-1) + b_t. They are
    computed from the convolved inputs x of a segment (equations 1 to 4 of the paper).
    """

    def gate(kernel: Float[Array, "H R R"], bias: Float[Array, "H R"]) -> Float[Array, "B T H R"]:
        logits = einsum_float32("bthr,hrs->bths", x, kernel.astype(x.dtype))
        return jax.nn.sigmoid(logits + bias[None, None])

    a, scale = decays(gates.rate, gate(gates.recurrence, gates.recurrence_bias))
    return a, scale * gate(gates.input, gates.input_bias) * x.astype(jnp.float32)


def decays(
    rate: Float[Array, "H R"], gate: Float[Array, "*B H R"]
) -> tuple[Float[Array, "*B H R"], Float[Array, "*B H R"]]:
    """Returns the factor a of the hidden state, and the factor sqrt(1 - a^2) of the gated input.

    The first factor is a = exp(-c softplus(rate) gate) with c = `SHARPNESS` (equations 3 and 4).
    """
    log_a = -SHARPNESS * jnp.broadcast_to(jax.nn.softplus(rate), gate.shape) * gate
    rest = -jnp.expm1(2 * log_a)  # This is 1 - a^2.
    # The derivative of the square root is infinite at 0, and `rest` is 0 if the gate is closed. The
    # inner `where` replaces 0 by 1, so that the gradient is not NaN.
    positive = rest > 0
    return jnp.exp(log_a), jnp.where(positive, jnp.sqrt(jnp.where(positive, rest, 1)), 0)


def scan(
    a: Float[Array, "B T H R"], b: Float[Array, "B T H R"], initial: Float[Array, "B H R"]
) -> Float[Array, "B T H R"]:
    """Returns the hidden states h_t = a_t h_(t-1) + b_t of all tokens, by an associative scan. The
    factor a is 0 for the first token of a document.
    """

    def compose_steps(
        first: tuple[Array, Array], second: tuple[Array, Array]
    ) -> tuple[Array, Array]:
        # A pair (a, b) stands for the step h -> a h + b. The result stands for `first` followed by
        # `second`.
        return first[0] * second[0], second[0] * first[1] + second[1]

    products, sums = jax.lax.associative_scan(compose_steps, (a, b), axis=1)
    return products * initial[:, None] + sums


# With every token, the hidden state of a channel is multiplied by a factor. The parameter `rate` of
# a new layer is drawn so that this factor is between these two numbers while the gate is open.
_SLOWEST, _FASTEST = 0.999, 0.9


class RGLRUState(NamedTuple):
    """The float32 hidden states, and the last L = `CONVOLVED` - 1 inputs of the convolution."""

    hidden: Float[Array, "B H R"]
    inputs: Float[Array, "B L H R"]


def rg_lru_state(model: Model) -> RGLRUState:
    heads, size = _channels(model)
    hidden = state_array((heads, size), ("heads", None), "float32")
    inputs = state_array((CONVOLVED - 1, heads, size), (None, "heads", None))
    return RGLRUState(hidden, inputs)


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
    return model.heads, model.model_dim // model.heads


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
        self.norm = norm_parameters(self, m, "norm")
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

    def __call__(self, x: Float[Array, "B T D"], given: Given) -> LayerOutput:
        since_start = tokens_since_start(given.document_start, x.shape[1])
        branch, inputs = self._project(x)
        convolved, last = convolution(inputs, given.state.inputs, self.convolution, since_start)
        a, b = self._steps(convolved)
        a = jnp.where((since_start == 0)[:, :, None, None], 0, a)
        hidden = scan(a, b, given.state.hidden)
        return LayerOutput(self._output(x, branch, hidden), RGLRUState(hidden[:, -1], last))

    def decode_step(self, x: Float[Array, "B 1 D"], given: Given) -> LayerOutput:
        branch, inputs = self._project(x)
        convolved, last = convolution_step(inputs, given.block.inputs, self.convolution)
        a, b = self._steps(convolved)
        hidden = a[:, 0] * given.block.hidden + b[:, 0]
        y = self._output(x, branch, hidden[:, None])
        return LayerOutput(y, RGLRUState(hidden, last))

    def _project(self, x: Float[Array, "B T D"]) -> tuple[Array, Array]:
        h = self._normed(x)
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

    def _output(
        self, x: Float[Array, "B T D"], branch: Array, hidden: Float[Array, "B T H R"]
    ) -> Float[Array, "B T D"]:
        return self._finish(
            x, dense(branch * hidden.astype(branch.dtype), self.output[0], inputs=2)
        )


register_kind(
    "rg_lru",
    LayerKind(RGLRULayer, rg_lru_state, {"state": ("hidden", "inputs")}, rg_lru_flops, RGLRU),
)
