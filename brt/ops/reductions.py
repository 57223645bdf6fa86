"""Sums as XLA's CPU backend likes them.

Those over leading axes, which are the gradient of every bias and scale, are products with ones: it
walks such a reduction against the memory's order, up to 25 times slower than the product. HIGHEST
keeps the sum in full float32 where matrix units would round.
"""

from functools import reduce

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from brt.distributed.rules import rows_adjoin
from brt.ops import dispatch

_AT_ONCE = 32  # numbers that XLA's CPU backend sums in one pass
_MOST_PARTS = 32


def sum_leading(x: Float[Array, "..."], axes: int) -> Float[Array, "..."]:
    """The sum over the first `axes` axes."""
    if not rows_adjoin(axes):
        return jnp.sum(x, axis=tuple(range(axes)))
    rows = x.reshape(-1, *x.shape[axes:])
    flat = rows.reshape(rows.shape[0], -1)
    total = jnp.matmul(jnp.ones((1, flat.shape[0]), x.dtype), flat, precision="highest")
    return total.reshape(x.shape[axes:])


def sum_last(x: Float[Array, "*B D"]) -> Float[Array, "*B 1"]:
    """The sum over the last axis. On CPUs wider vectors than XLA sums in one pass are folded first:
    it else stores what is summed."""
    parts, rest = divmod(x.shape[-1], _AT_ONCE)
    if dispatch.backend() == "cpu" and 1 < parts <= _MOST_PARTS and not rest:
        x = reduce(jnp.add, jnp.split(x, parts, axis=-1))
    return jnp.sum(x, axis=-1, keepdims=True)


def sum_in_turn(x: Float[Array, "..."], axes: int) -> Float[Array, "..."]:
    """The sum over the first `axes` axes, one after the other: where a row fills a cache.

    What a loop reads is stored: XLA's CPU backend else works x out anew for the sum.
    """
    if not rows_adjoin(axes):
        return jnp.sum(x, axis=tuple(range(axes)))
    rows = x.reshape(-1, *x.shape[axes:])
    return jax.lax.scan(lambda total, row: (total + row, None), jnp.zeros_like(rows[0]), rows)[0]


def _along(shared: Array, x: Array) -> Array:
    """With axes of one in front, and in x's dtype."""
    return shared.astype(x.dtype).reshape((1,) * (x.ndim - shared.ndim) + shared.shape)


def _gradient(shared: Array, terms: Array) -> Array:
    terms = terms.astype(jnp.float32)
    return sum_leading(terms, terms.ndim - shared.ndim).astype(shared.dtype)


@jax.custom_vjp
def add_shared(x: Float[Array, "..."], bias: Float[Array, "..."]) -> Float[Array, "..."]:
    """x + bias in x's dtype; the bias lacks leading axes of x, over which its gradient sums."""
    return x + _along(bias, x)


add_shared.defvjp(
    lambda x, bias: (add_shared(x, bias), bias),
    lambda bias, gradient: (gradient, _gradient(bias, gradient)),
)


@jax.custom_vjp
def scale_shared(x: Float[Array, "..."], scale: Float[Array, "..."]) -> Float[Array, "..."]:
    """x * scale in x's dtype; the scale lacks leading axes of x, over which its gradient sums."""
    return x * _along(scale, x)


def _scale_backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, scale = saved
    return gradient * _along(scale, x), _gradient(scale, gradient * x)


scale_shared.defvjp(lambda x, scale: (scale_shared(x, scale), (x, scale)), _scale_backward)
