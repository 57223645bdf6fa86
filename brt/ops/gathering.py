"""Gathering of vectors by head."""

import jax
from jaxtyping import Array, Float, Int


def take(x: Float[Array, "B H Z K"], indices: Int[Array, "B H Q R"]) -> Float[Array, "B H Q R K"]:
    """Returns the vectors of x at the given indices, separately for each head; every index must
    exist.
    """

    def take_in_head(x: Array, indices: Array) -> Array:
        """Returns the vectors of one head."""
        return x.at[indices].get(mode="promise_in_bounds")

    return jax.vmap(jax.vmap(take_in_head))(x, indices)
