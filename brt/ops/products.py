"""Products of batches of matrices, with float32 sums and results.

The suffix of a name has a letter for each factor, as in BLAS: N for a factor as it is, T for a
factor that is transposed.

Generation multiplies a few vectors with large matrices. XLA's CPU backend is slow at these products
in the form that is fast for many vectors; `BackendPolicy.rewrites_few_rows` turns on other forms.
"""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from brt.ops import dispatch
from brt.ops.layout import transposed

# At most this many vectors are multiplied one by one.
_MOST_SEPARATE = 4
# At most this many vectors are multiplied as columns of a matrix.
_MOST_COLUMNS = 63


# `jnp.einsum` with float32 sums, for orders of the axes that the products of all backends support;
# `einsum_float32` supports any order.
einsum: Callable[..., Array] = partial(jnp.einsum, preferred_element_type=jnp.float32)


def einsum_float32(spec: str, a: Float[Array, "..."], b: Float[Array, "..."]) -> Array:
    """Returns jnp.einsum(spec, a, b) in float32, for any order of the axes."""
    # XLA's CPU backend cannot multiply bfloat16 factors into a transposed float32 result. Factors
    # that are converted to float32 have the same product, because the product of two bfloat16
    # numbers is exact in float32.
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


def stacked_products(
    a: Float[Array, "*B M N"], b: Float[Array, "*B N P"]
) -> Float[Array, "*B M P"]:
    product, rows = partial(jnp.matmul, preferred_element_type=jnp.float32), a.shape[-2]
    if not dispatch.policy().rewrites_few_rows or not 1 < rows <= _MOST_SEPARATE:
        return product(a, b)
    # XLA's CPU backend would copy `b` for the product of all rows.
    return jnp.concatenate([product(row, b) for row in jnp.split(a, rows, axis=-2)], axis=-2)


def transposed_product(x: Float[Array, "*B D"], matrix: Float[Array, "V D"]) -> Array:
    """Returns x @ matrix.T in float32."""
    rows = math.prod(x.shape[:-1])
    if not dispatch.policy().rewrites_few_rows or not 1 < rows <= _MOST_COLUMNS:
        return jnp.einsum("...d,vd->...v", x, matrix, preferred_element_type=jnp.float32)
    multiply = partial(jnp.matmul, matrix, preferred_element_type=jnp.float32)
    return product_of_columns(x.reshape(rows, -1), multiply).reshape(*x.shape[:-1], len(matrix))


def product_of_columns(
    x: Float[Array, "R D"], multiply: Callable[[Float[Array, "D R"]], Float[Array, "V R"]]
) -> Float[Array, "R V"]:
    """Returns the products of a matrix and the R rows of x.

    `multiply` computes the product of the matrix and these vectors as columns.
    """
    # XLA's CPU backend is fastest at 8 to 32 vectors if the matrix [V, D] is the left factor, in
    # row-major order. Transposed copies of the few vectors and of their products cost little.
    return transposed(multiply(transposed(x)))
