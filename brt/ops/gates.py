"""Gates of the recurrent cell (Block-Recurrent Transformers, equations 1-4)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from brt.ops.dense import dense


class GateWeights(NamedTuple):
    """Weights of one gate; what a kind of gate does not use is None.

    Attributes:
      bias: [D], of the fixed, forget (lstm) or update (gru) gate.
      kernel: [*M, D], of the forget (lstm) or update (gru) gate; M: axes of its features.
      input_bias: [D], lstm.
      input_kernel: [*M, D], lstm.
    """

    bias: Float[Array, " D"]
    kernel: Float[Array, "*M D"] | None = None
    input_bias: Float[Array, " D"] | None = None
    input_kernel: Float[Array, "*M D"] | None = None


def _sigmoid(
    h: Float[Array, "B S *M"],
    kernel: Float[Array, "*M D"],
    bias: Float[Array, " D"],
    shift: float,
) -> Float[Array, "B S D"]:
    logits = dense(h, kernel, kernel.ndim - 1).astype(jnp.float32)
    return jax.nn.sigmoid(logits + bias[None, None] + shift)


def gate(
    kind: str,
    weights: GateWeights,
    s: Float[Array, "B S D"],
    z: Float[Array, "B S D"],
    h: Float[Array, "B S *M"],
) -> Float[Array, "B S D"]:
    """The next state from the state `s`, the update `z` and the features `h` (float32).

    fixed: g s + (1 - g) z with a learned constant g (equations 2-3);
    lstm: f s + i z, biased to remember by +1 and -1 (equation 4, section 3.5);
    gru: g s + (1 - g) z with g computed from h, biased by +1 (the original's code).
    """
    z = z.astype(jnp.float32)
    if kind == "fixed":
        g = jax.nn.sigmoid(weights.bias)[None, None]
        return g * s + (1 - g) * z
    if kind == "lstm":
        forget = _sigmoid(h, weights.kernel, weights.bias, 1.0)
        update = _sigmoid(h, weights.input_kernel, weights.input_bias, -1.0)
        return forget * s + update * z
    if kind == "gru":
        g = _sigmoid(h, weights.kernel, weights.bias, 1.0)
        return g * s + (1 - g) * z
    raise ValueError(f"gate = {kind!r} must be 'fixed', 'lstm' or 'gru'")
