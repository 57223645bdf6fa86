"""Gathering of the vectors [Z, K] of each head by Q x R indices that differ between heads."""

import jax
from jaxtyping import Array, Float, Int


def take(x: Float[Array, "B H Z K"], indices: Int[Array, "B H Q R"]) -> Float[Array, "B H Q R K"]:
    """Returns the vectors of x at each head's own indices, which must be from 0 to Z - 1."""

    def take_in_head(x: Array, indices: Array) -> Array:
        return x.at[indices].get(mode="promise_in_bounds")

    return jax.vmap(jax.vmap(take_in_head))(x, indices)
