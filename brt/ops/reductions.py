"""Sums over leading axes as products with ones.

XLA's CPU backend walks such a reduction against the memory's order: up to 25 times slower
than the product, and it is the gradient of every bias and scale. HIGHEST keeps the sum in
full float32 where matrix units would round.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def sum_leading(x: Float[Array, "..."], axes: int) -> Float[Array, "..."]:
    """The sum over the first `axes` axes."""
    rows = x.reshape(-1, *x.shape[axes:])
    flat = rows.reshape(rows.shape[0], -1)
    total = jnp.matmul(jnp.ones((1, flat.shape[0]), x.dtype), flat, precision="highest")
    return total.reshape(x.shape[axes:])


@jax.custom_vjp
def add_tile(x: Float[Array, "..."], tile: Float[Array, "..."]) -> Float[Array, "..."]:
    """x + tile, where x has more leading axes."""
    return x + tile.reshape((1,) * (x.ndim - tile.ndim) + tile.shape)


def _add_forward(x: Array, tile: Array) -> tuple[Array, int]:
    return add_tile(x, tile), x.ndim - tile.ndim


def _add_backward(axes: int, gradient: Array) -> tuple[Array, Array]:
    return gradient, sum_leading(gradient, axes)


add_tile.defvjp(_add_forward, _add_backward)


@jax.custom_vjp
def scale_last(x: Float[Array, "..."], scale: Float[Array, " D"]) -> Float[Array, "..."]:
    """x * scale along the last axis."""
    return x * scale.reshape((1,) * (x.ndim - 1) + scale.shape)


def _scale_forward(x: Array, scale: Array) -> tuple[Array, tuple[Array, Array]]:
    return scale_last(x, scale), (x, scale)


def _scale_backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, scale = saved
    return scale_last(gradient, scale), sum_leading(gradient * x, x.ndim - 1)


scale_last.defvjp(_scale_forward, _scale_backward)
