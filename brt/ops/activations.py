"""Activations of MLPs, with a ReLU that saves only its output for the backward pass.

The next matrix product saves this output for its own gradient anyway, so the ReLU itself needs no
memory.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from brt.ops import dispatch
from brt.ops.tpu import materialized


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def relu(x: Float[Array, "..."], saves_result: bool = False) -> Float[Array, "..."]:
    """Returns max(x, 0) in the shape and dtype of x; the backward pass reads only the result.

    Args:
      x: an array of any shape.
      saves_result: True if a rematerialized layer saves the result, so that the backward pass need
        not compute x and the result again. Callers pass True if the next matrix product needs the
        result for its own gradient anyway.
    """
    return jnp.maximum(x, 0)


def _relu_forward(x: Array, saves_result: bool) -> tuple[Array, Array]:
    y = relu(x)
    if saves_result:
        y = dispatch.output_residual(materialized(dispatch.to_bits(y)), x.dtype)
    return y, y


def _relu_backward(saves_result: bool, y: Array, gradient: Array) -> tuple[Array]:
    return (jnp.where(y > 0, gradient, 0),)


relu.defvjp(_relu_forward, _relu_backward)


def activation(
    x: Float[Array, "..."], name: str, *, saves_result: bool = False
) -> Float[Array, "..."]:
    """Returns the activation of every number of x, in x's dtype.

    Args:
      x: an array of any shape.
      name: "relu", "gelu" (exact), "gelu_tanh" (its approximation by a tanh) or "silu".
      saves_result: for "relu", True if a rematerialized layer saves the result (see `relu`); the
        other activations ignore this argument.
    """
    if name == "relu":
        return relu(x, saves_result)
    if name == "silu":
        return jax.nn.silu(x)
    return jax.nn.gelu(x, approximate=name == "gelu_tanh")
