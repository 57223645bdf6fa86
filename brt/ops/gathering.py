"""Gathering of vectors by head."""

import jax
from jaxtyping import Array, Float, Int


def take(x: Float[Array, "B H Z K"], indices: Int[Array, "B H Q R"]) -> Float[Array, "B H Q R K"]:
    """Returns the vectors at the given indices, head by head; every index must exist."""

    def of_head(x: Array, indices: Array) -> Array:
        return x.at[indices].get(mode="promise_in_bounds")

    return jax.vmap(jax.vmap(of_head))(x, indices)
