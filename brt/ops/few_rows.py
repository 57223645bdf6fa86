"""Products of a few vectors with large matrices, as in generation.

XLA's CPU backend computes such products slowly in the form in which products of many vectors are
fast. `BackendPolicy.rewrites_few_rows` turns on other forms of the same products.
"""

import math
from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Float

from brt.ops import dispatch

# At most this many vectors are multiplied one by one.
_MOST_SEPARATE = 4
# A product of 2 to 7 vectors with a transposed matrix takes four times as long as that of 8.
_FEWEST = 8


def stacked_products(
    a: Float[Array, "*B M N"], b: Float[Array, "*B N P"]
) -> Float[Array, "*B M P"]:
    """Returns the matrix products of a and b, float32.

    On CPUs, a product of two to four rows of `a` is computed row by row, because XLA would copy `b`
    for the product of all rows.
    """
    product, rows = partial(jnp.matmul, preferred_element_type=jnp.float32), a.shape[-2]
    if not dispatch.policy().rewrites_few_rows or not 1 < rows <= _MOST_SEPARATE:
        return product(a, b)
    return jnp.concatenate([product(row, b) for row in jnp.split(a, rows, axis=-2)], axis=-2)


def transposed_product(x: Float[Array, "*B D"], matrix: Float[Array, "V D"]) -> Array:
    """Returns the float32 product [*B, V] of vectors x with the transpose of a matrix.

    On CPUs, zeros are added to fewer than eight vectors.
    """
    product = partial(jnp.einsum, "...d,vd->...v", preferred_element_type=jnp.float32)
    rows = math.prod(x.shape[:-1])
    if not dispatch.policy().rewrites_few_rows or not 1 < rows < _FEWEST:
        return product(x, matrix)
    padded = jnp.pad(x.reshape(rows, -1), ((0, _FEWEST - rows), (0, 0)))
    return product(padded, matrix)[:rows].reshape(*x.shape[:-1], len(matrix))
