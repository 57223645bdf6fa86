"""Products with a weight matrix."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@jax.custom_vjp
def dense(x: Float[Array, "*B M"], kernel: Float[Array, "M D"]) -> Float[Array, "*B D"]:
    """x @ kernel in x's dtype."""
    return jnp.einsum("...m,md->...d", x, kernel.astype(x.dtype))


def _forward(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return dense(x, kernel), (x, kernel)


def _backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, kernel = saved
    dx = jnp.einsum("...d,md->...m", gradient, kernel.astype(gradient.dtype))
    return dx, weight_gradient(x, gradient).astype(kernel.dtype)


def weight_gradient(x: Float[Array, "*B M"], dy: Float[Array, "*B D"]) -> Float[Array, "M D"]:
    """The sum over all rows of x^T dy, in float32.

    Over one axis of rows: for a sum over two, XLA's CPU backend writes both factors anew,
    transposed, which takes longer than the product of a small model.
    """
    x, dy = (leaf.reshape(-1, leaf.shape[-1]) for leaf in (x, dy))
    return jnp.einsum("nm,nd->md", x, dy, preferred_element_type=jnp.float32)


dense.defvjp(_forward, _backward)
