"""Gates of the recurrent cell (Block-Recurrent Transformers, equations 1-4).

In shapes, S is the number of states, and D the size of a state; *M stands for the axes of the
features from which a gate is computed.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from brt.ops.dense import dense


class GateWeights(NamedTuple):
    """Weights of one gate; fields that the kind of gate does not use are None."""

    # The bias of the gate (fixed), of the forget gate (lstm) or of the update gate (gru).
    bias: Float[Array, " D"]
    # The kernel of the forget gate (lstm) or of the update gate (gru).
    kernel: Float[Array, "*M D"] | None = None
    input_bias: Float[Array, " D"] | None = None  # the bias of the input gate (lstm)
    input_kernel: Float[Array, "*M D"] | None = None  # the kernel of the input gate (lstm)


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
    """Returns the next states in float32, a mixture of the states s and the proposed updates z.

    The kinds of gates are the following; f, i and the g of gru are computed from the features h:

      * fixed: g s + (1 - g) z with a learned constant g (equations 2-3);
      * lstm: f s + i z; +1 and -1 are added to the biases of f and i, so that the gate remembers at
        first (equation 4, section 3.5);
      * gru: g s + (1 - g) z; +1 is added to the bias, as in the original code of the paper.
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
