"""Activations of MLPs, with a ReLU that saves only its output for the backward pass."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@jax.custom_vjp
def relu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns max(x, 0); the backward pass reads only the result."""
    return jnp.maximum(x, 0)


def _relu_forward(x: Array) -> tuple[Array, Array]:
    y = relu(x)
    return y, y


relu.defvjp(_relu_forward, lambda y, gradient: (jnp.where(y > 0, gradient, 0),))


def activation(x: Float[Array, "..."], name: str) -> Float[Array, "..."]:
    """Returns the activation of every number of x.

    `name` is "relu", "gelu" (exact), "gelu_tanh" (its approximation by a tanh) or "silu".
    """
    if name == "relu":
        return relu(x)
    if name == "silu":
        return jax.nn.silu(x)
    return jax.nn.gelu(x, approximate=name == "gelu_tanh")
