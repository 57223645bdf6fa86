"""The arithmetic of RG-LRU: a gated linear recurrence over tokens.

The equations are those of Griffin (De et al. 2024, arXiv 2402.19427), section 2.4.

In shapes, B is the number of rows of the batch, T of tokens of a segment, H of heads, and R of
channels of a head; *B stands for any leading axes.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from brt.ops.products import einsum_float32

SHARPNESS = 8.0  # This is the constant c of the paper's equation 3.


class GateParameters(NamedTuple):
    """Parameters of the input gate, the recurrence gate and the decay of every channel.

    Attributes:
      input: [H, R, R], the kernel from the convolved inputs to the input gates, which scale the
        inputs of the recurrence.
      input_bias: [H, R], the bias of the input gates.
      recurrence: [H, R, R], the kernel from the convolved inputs to the recurrence gates, on which
        the decay depends.
      recurrence_bias: [H, R], the bias of the recurrence gates.
      rate: [H, R], the parameter that determines how fast the hidden state decays (see `decays`).
    """

    input: Float[Array, "H R R"]
    input_bias: Float[Array, "H R"]
    recurrence: Float[Array, "H R R"]
    recurrence_bias: Float[Array, "H R"]
    rate: Float[Array, "H R"]


def recurrence_coefficients(
    x: Float[Array, "B T H R"], gates: GateParameters
) -> tuple[Float[Array, "B T H R"], Float[Array, "B T H R"]]:
    """Returns the float32 factors a and inputs b of the recurrence h_t = a_t h_(t-1) + b_t for the
    tokens of a segment (equations 1 to 4 of the paper).

    Args:
      x: the convolved inputs of the layer.
      gates: the parameters, in float32.
    """

    def gate(kernel: Float[Array, "H R R"], bias: Float[Array, "H R"]) -> Float[Array, "B T H R"]:
        """Returns the values, between 0 and 1, of a gate of every channel for every token.

        `kernel` maps the convolved inputs to logits, to which `bias` is added before the sigmoid.
        """
        logits = einsum_float32("bthr,hrs->bths", x, kernel.astype(x.dtype))
        return jax.nn.sigmoid(logits + bias[None, None])

    a, scale = decays(gates.rate, gate(gates.recurrence, gates.recurrence_bias))
    return a, scale * gate(gates.input, gates.input_bias) * x.astype(jnp.float32)


def decays(
    rate: Float[Array, "H R"], gate: Float[Array, "*B H R"]
) -> tuple[Float[Array, "*B H R"], Float[Array, "*B H R"]]:
    """Returns the factor a of the hidden state, and the factor sqrt(1 - a^2) of the gated input.

    The factor is a = exp(-c softplus(rate) gate) with c = `SHARPNESS` (equations 3 and 4 of the
    paper).

    Args:
      rate: float32, the parameter of each channel.
      gate: float32, the values of the recurrence gate, between 0 and 1.
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
    """Returns the hidden states h_t = a_t h_(t-1) + b_t of all tokens, by an associative scan.

    Args:
      a: float32 factors; 0 for the first token of a document.
      b: float32 inputs.
      initial: float32, the hidden state before the first token.
    """

    def compose_steps(
        first: tuple[Array, Array], second: tuple[Array, Array]
    ) -> tuple[Array, Array]:
        """Returns the step that has the same effect as the step `first` followed by the step
        `second`. The pair (a, b) stands for the step h -> a h + b.
        """
        return first[0] * second[0], second[0] * first[1] + second[1]

    products, sums = jax.lax.associative_scan(compose_steps, (a, b), axis=1)
    return products * initial[:, None] + sums
