"""Sums that are fast on CPUs, and an addition and a product whose gradients are such sums.

XLA's CPU backend computes a sum over leading axes against the memory order, up to 25 times more
slowly than a matrix product. The sums are therefore computed as products with a vector of ones. The
precision HIGHEST keeps float32 on hardware whose matrix units would round to bfloat16.
"""

from functools import reduce

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from brt.distributed.rules import can_merge_axes
from brt.ops import dispatch

# XLA's CPU backend sums this many adjacent numbers in one pass.
_VECTOR_WIDTH = 32
# `sum_last` does not split a vector that would have more than this many parts, because each part
# adds a slice and an addition to the program.
_MAX_PARTS = 32


def sum_leading(x: Float[Array, "..."], axes: int) -> Float[Array, "..."]:
    """Returns the sum of x over the first `axes` axes, in x's dtype."""
    if not can_merge_axes(axes):
        return jnp.sum(x, axis=tuple(range(axes)))
    rows = x.reshape(-1, *x.shape[axes:])
    flat = rows.reshape(rows.shape[0], -1)
    total = jnp.matmul(jnp.ones((1, flat.shape[0]), x.dtype), flat, precision="highest")
    return total.reshape(x.shape[axes:])


def sum_last(x: Float[Array, "*B D"]) -> Float[Array, "*B 1"]:
    """Returns the sum of x over the last axis, which stays in the result with size 1."""
    parts, rest = divmod(x.shape[-1], _VECTOR_WIDTH)
    # If vectors have more than 32 numbers, XLA's CPU backend would store x before the sum. Parts of
    # 32 numbers are therefore first added elementwise.
    if dispatch.policy().splits_wide_sums and 1 < parts <= _MAX_PARTS and not rest:
        x = reduce(jnp.add, jnp.split(x, parts, axis=-1))
    return jnp.sum(x, axis=-1, keepdims=True)


def sequential_sum(x: Float[Array, "..."], axes: int) -> Float[Array, "..."]:
    """Returns the sum of x over the first `axes` axes, by a loop that adds one term at a time.

    The loop is faster than `sum_leading` if one term, such as x[0, ..., 0], fills a processor's
    cache. The loop makes XLA's CPU backend store x, instead of computing x again for the sum.
    """
    if not can_merge_axes(axes):
        return jnp.sum(x, axis=tuple(range(axes)))
    rows = x.reshape(-1, *x.shape[axes:])
    return jax.lax.scan(lambda total, row: (total + row, None), jnp.zeros_like(rows[0]), rows)[0]


def _broadcastable(shared: Array, x: Array) -> Array:
    return shared.astype(x.dtype).reshape((1,) * (x.ndim - shared.ndim) + shared.shape)


def _shared_gradient(shared: Array, terms: Array) -> Array:
    terms = terms.astype(jnp.float32)
    return sum_leading(terms, terms.ndim - shared.ndim).astype(shared.dtype)


@jax.custom_vjp
def add_shared(x: Float[Array, "..."], bias: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns x + bias in x's dtype, for a bias that has only the last axes of x."""
    return x + _broadcastable(bias, x)


add_shared.defvjp(
    lambda x, bias: (add_shared(x, bias), bias),
    lambda bias, gradient: (gradient, _shared_gradient(bias, gradient)),
)


@jax.custom_vjp
def scale_shared(x: Float[Array, "..."], scale: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns x * scale in x's dtype, for a scale that has only the last axes of x."""
    return x * _broadcastable(scale, x)


def _scale_backward(residuals: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, scale = residuals
    return gradient * _broadcastable(scale, x), _shared_gradient(scale, gradient * x)


scale_shared.defvjp(lambda x, scale: (scale_shared(x, scale), (x, scale)), _scale_backward)
