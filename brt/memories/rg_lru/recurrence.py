"""The arithmetic of RG-LRU: a gated linear recurrence over tokens (Griffin, De et al. 2024, arXiv
2402.19427, section 2.4). All arrays but the convolved inputs are float32.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from brt.ops.products import einsum_float32

SHARPNESS = 8.0  # This is the constant c of the paper's equation 3.


class GateParameters(NamedTuple):
    """Float32 kernels and biases of the input gate, which scales the inputs of the recurrence, and
    of the recurrence gate, on which the decay depends; `rate` sets how fast the state decays.
    """

    input: Float[Array, "H R R"]
    input_bias: Float[Array, "H R"]
    recurrence: Float[Array, "H R R"]
    recurrence_bias: Float[Array, "H R"]
    rate: Float[Array, "H R"]


def recurrence_coefficients(
    x: Float[Array, "B T H R"], gates: GateParameters
) -> tuple[Float[Array, "B T H R"], Float[Array, "B T H R"]]:
    """Returns the factors a and inputs b of the recurrence h_t = a_t h_(t-1) + b_t for the
    convolved inputs x of a segment (equations 1 to 4 of the paper).
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

    The factor is a = exp(-c softplus(rate) gate) with c = `SHARPNESS` (equations 3 and 4).
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
        # A pair (a, b) stands for the step h -> a h + b; the result is `first`, then `second`.
        return first[0] * second[0], second[0] * first[1] + second[1]

    products, sums = jax.lax.associative_scan(compose_steps, (a, b), axis=1)
    return products * initial[:, None] + sums
