"""The gated delta rule, computed token by token. Tests compare the rule by chunks with it.

In shapes, B is the number of rows of the batch, T of tokens of a segment, H of heads, K of channels
of a key, and V of channels of a value.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brt.memories.gated_delta_net.delta_rule import Writes, delta_step


def delta_rule(
    tokens: Writes, state: Float[Array, "B H K V"], since_start: Int[Array, "B T"]
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """Returns what every token of a segment reads, and the state after the segment, both float32.

    Args:
      tokens: the inputs of the tokens of the segment.
      state: float32, the state before the segment.
      since_start: the result of `brt.memories.convolution.tokens_since_start`.
    """

    def body(state: Array, inputs: tuple[Writes, Array]) -> tuple[Array, Array]:
        """Returns the state after a token, and what the token reads, [B, H, V].

        `inputs` has the inputs of the token and its number of earlier tokens of the document.
        """
        token, since = inputs
        state = jnp.where((since == 0)[:, None, None, None], 0, state)
        read, state = delta_step(Writes(*(x[:, None] for x in token)), state)
        return state, read[:, 0]

    by_token = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (tokens, since_start))
    state, read = jax.lax.scan(body, state, by_token)
    return jnp.moveaxis(read, 0, 1), state
