"""Matrix products of batches of matrices, with float32 sums.

The suffix of a product's name follows BLAS: N stands for a factor as it is, T for a transposed
factor.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from brt.ops import dispatch
from brt.ops.layout import transposed


def einsum_float32(spec: str, a: Float[Array, "..."], b: Float[Array, "..."]) -> Array:
    """Returns jnp.einsum of two factors in float32, for any order of the axes.

    XLA's CPU backend has no product of bfloat16 factors whose float32 result is transposed. The
    factors are therefore converted to float32 on CPUs. The result is the same, because products of
    bfloat16 numbers are exact in float32.
    """
    if dispatch.policy().float32_factors:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)


@jax.custom_vjp
def matmul_nt(a: Float[Array, "*B M K"], b: Float[Array, "*B N K"]) -> Float[Array, "*B M N"]:
    """Returns a b^T in float32."""
    return jnp.einsum("...mk,...nk->...mn", a, b, preferred_element_type=jnp.float32)


@jax.custom_vjp
def matmul_nn(a: Float[Array, "*B M N"], b: Float[Array, "*B N K"]) -> Float[Array, "*B M K"]:
    """Returns a b in float32."""
    return jnp.einsum("...mn,...nk->...mk", a, b, preferred_element_type=jnp.float32)


def matmul_tn(a: Float[Array, "*B N M"], b: Float[Array, "*B N K"]) -> Float[Array, "*B M K"]:
    """Returns a^T b in float32.

    The left factor is transposed in memory first; XLA's CPU backend takes twice as long if it reads
    the factor against its memory order.
    """
    return matmul_nn(transposed(a), b)


def _matmul_nt_backward(residuals: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    a, b = residuals
    d_a = matmul_nn(gradient.astype(b.dtype), b)
    d_b = matmul_tn(gradient.astype(a.dtype), a)
    return d_a.astype(a.dtype), d_b.astype(b.dtype)


def _matmul_nn_backward(residuals: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    a, b = residuals
    d_a = matmul_nt(gradient.astype(b.dtype), b)
    d_b = matmul_tn(a, gradient.astype(a.dtype))
    return d_a.astype(a.dtype), d_b.astype(b.dtype)


matmul_nt.defvjp(lambda a, b: (matmul_nt(a, b), (a, b)), _matmul_nt_backward)
matmul_nn.defvjp(lambda a, b: (matmul_nn(a, b), (a, b)), _matmul_nn_backward)
