"""Products of a few vectors with large matrices, as in generation.

XLA's CPU backend computes such products slowly in the form in which products of many vectors are
fast; `BackendPolicy.rewrites_few_rows` turns on other forms.
"""

import math
from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Float

from brt.ops import dispatch
from brt.ops.layout import transposed

# At most this many vectors are multiplied one by one.
_MOST_SEPARATE = 4
# At most this many vectors are multiplied as columns of a matrix.
_MOST_COLUMNS = 63


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
    """Returns the products of R vectors with a matrix, which `multiply` multiplies by columns."""
    # XLA's CPU backend is fastest at 8 to 32 vectors if the matrix [V, D] is the left factor, in
    # row-major order. Transposed copies of the few vectors and of their products cost little.
    return transposed(multiply(transposed(x)))
