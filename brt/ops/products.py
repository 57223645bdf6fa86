"""Products of batches of matrices; sums are in float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from brt.ops import dispatch
from brt.ops.layout import transposed


def float32_sums(spec: str, a: Float[Array, "..."], b: Float[Array, "..."]) -> Array:
    """jnp.einsum of two factors with float32 sums, in whatever order the axes are.

    XLA's CPU backend has no product of bfloat16 factors whose float32 result is transposed. There
    the factors are widened first, which changes no digit: their products are exact in float32.
    """
    if dispatch.backend() == "cpu":
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)


@jax.custom_vjp
def inner(a: Float[Array, "*B M K"], b: Float[Array, "*B N K"]) -> Float[Array, "*B M N"]:
    """Every row of a times every row of b: a b^T."""
    return jnp.einsum("...mk,...nk->...mn", a, b, preferred_element_type=jnp.float32)


@jax.custom_vjp
def combined(a: Float[Array, "*B M N"], b: Float[Array, "*B N K"]) -> Float[Array, "*B M K"]:
    """Sums of the rows of b, weighted by every row of a: a b."""
    return jnp.einsum("...mn,...nk->...mk", a, b, preferred_element_type=jnp.float32)


def weighted_rows(a: Float[Array, "*B N M"], b: Float[Array, "*B N K"]) -> Float[Array, "*B M K"]:
    """Sums of the rows of b, weighted by every column of a: a^T b.

    The left factor is transposed in memory first: XLA's CPU backend else takes twice as long.
    """
    return combined(transposed(a), b)


def _inner_backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    a, b = saved
    d_a = combined(gradient.astype(b.dtype), b)
    d_b = weighted_rows(gradient.astype(a.dtype), a)
    return d_a.astype(a.dtype), d_b.astype(b.dtype)


def _combined_backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    a, b = saved
    d_a = inner(gradient.astype(b.dtype), b)
    d_b = weighted_rows(a, gradient.astype(a.dtype))
    return d_a.astype(a.dtype), d_b.astype(b.dtype)


inner.defvjp(lambda a, b: (inner(a, b), (a, b)), _inner_backward)
combined.defvjp(lambda a, b: (combined(a, b), (a, b)), _combined_backward)
