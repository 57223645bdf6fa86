"""Matrix products of batches of matrices, whose sums and results are float32.

The suffix of a name has a letter for each factor, as in BLAS: N for a factor as it is, T for a
factor that is transposed.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from brt.ops import dispatch
from brt.ops.layout import transposed


def einsum_float32(spec: str, a: Float[Array, "..."], b: Float[Array, "..."]) -> Array:
    """Returns jnp.einsum(spec, a, b) in float32, for any order of the axes."""
    # XLA's CPU backend has no product of bfloat16 factors whose float32 result is transposed. The
    # result is the same, because products of bfloat16 numbers are exact in float32.
    if dispatch.policy().float32_factors:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)


@jax.custom_vjp
def matmul_nt(a: Float[Array, "*B M K"], b: Float[Array, "*B N K"]) -> Float[Array, "*B M N"]:
    """Returns a b^T for each pair of matrices."""
    return jnp.einsum("...mk,...nk->...mn", a, b, preferred_element_type=jnp.float32)


@jax.custom_vjp
def matmul_nn(a: Float[Array, "*B M N"], b: Float[Array, "*B N K"]) -> Float[Array, "*B M K"]:
    """Returns a b for each pair of matrices."""
    return jnp.einsum("...mn,...nk->...mk", a, b, preferred_element_type=jnp.float32)


def matmul_tn(a: Float[Array, "*B N M"], b: Float[Array, "*B N K"]) -> Float[Array, "*B M K"]:
    """Returns a^T b for each pair of matrices."""
    # XLA's CPU backend takes twice as long for a product that reads a factor against its memory
    # order.
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
