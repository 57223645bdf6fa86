"""Activations whose backward pass needs only their output, which the next product keeps anyway."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from brt.ops import dispatch
from brt.ops.tpu import stored


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def relu(x: Float[Array, "..."], keeps: bool = False) -> Float[Array, "..."]:
    """max(x, 0).

    Args:
      keeps: layers that are computed again keep it, in place of the product that x is.
    """
    return jnp.maximum(x, 0)


def _forward(x: Array, keeps: bool) -> tuple[Array, Array]:
    y = relu(x)
    if keeps:
        y = dispatch.kept(stored(dispatch.bits(y)), x.dtype)
    return y, y


def _backward(keeps: bool, y: Array, gradient: Array) -> tuple[Array]:
    return (jnp.where(y > 0, gradient, 0),)


relu.defvjp(_forward, _backward)
