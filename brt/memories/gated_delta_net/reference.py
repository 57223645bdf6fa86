"""The gated delta rule (see `delta_rule.py`), computed token by token.

Tests compare the faster algorithm, which computes chunks of tokens, with this implementation.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brt.memories.gated_delta_net.delta_rule import DeltaInputs, delta_step


def delta_rule(
    tokens: DeltaInputs, state: Float[Array, "B H K V"], since_start: Int[Array, "B T"]
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    def body(state: Array, inputs: tuple[DeltaInputs, Array]) -> tuple[Array, Array]:
        token, since = inputs
        state = jnp.where((since == 0)[:, None, None, None], 0, state)
        read, state = delta_step(DeltaInputs(*(x[:, None] for x in token)), state)
        return state, read[:, 0]

    by_token = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (tokens, since_start))
    state, read = jax.lax.scan(body, state, by_token)
    return jnp.moveaxis(read, 0, 1), state
