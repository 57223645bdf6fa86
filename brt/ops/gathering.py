"""Gathering of vectors by indices that differ between heads.

In shapes, B is the number of rows of the batch, H of heads, Z of vectors of a head, and K of
numbers of a vector; a head has Q x R indices.
"""

import jax
from jaxtyping import Array, Float, Int


def take(x: Float[Array, "B H Z K"], indices: Int[Array, "B H Q R"]) -> Float[Array, "B H Q R K"]:
    """Returns the vectors of x at each head's own indices, which must be from 0 to Z - 1."""

    def take_in_head(x: Array, indices: Array) -> Array:
        """Returns the vectors x [Z, K] of one head at the head's indices [Q, R]."""
        return x.at[indices].get(mode="promise_in_bounds")

    return jax.vmap(jax.vmap(take_in_head))(x, indices)
