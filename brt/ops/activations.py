"""Activations of MLPs, with a ReLU that saves only its output for the backward pass."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from brt.ops import dispatch
from brt.ops.tpu import materialized


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def relu(x: Float[Array, "..."], saves_result: bool = False) -> Float[Array, "..."]:
    """Returns max(x, 0); the backward pass reads only the result.

    `saves_result` lets a rematerialized layer save the result, which costs nothing if the next
    matrix product saves it anyway.
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
    """Returns the activation of every number of x.

    `name` is "relu", "gelu" (exact), "gelu_tanh" (its approximation by a tanh) or "silu". Only
    "relu" uses `saves_result`.
    """
    if name == "relu":
        return relu(x, saves_result)
    if name == "silu":
        return jax.nn.silu(x)
    return jax.nn.gelu(x, approximate=name == "gelu_tanh")
