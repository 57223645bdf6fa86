"""The gated delta rule (see `delta_rule.py`), computed token by token.

Tests compare the faster algorithm, which computes chunks of tokens, with this implementation.

In shapes, B is the number of rows of the batch, T of tokens of a segment, H of heads, K of channels
of a key, and V of channels of a value.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brt.memories.gated_delta_net.delta_rule import DeltaInputs, delta_step


def delta_rule(
    tokens: DeltaInputs, state: Float[Array, "B H K V"], since_start: Int[Array, "B T"]
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """Computes the gated delta rule for all tokens of a segment, one after the other.

    Args:
      tokens: the inputs of the rule for the tokens of the segment.
      state: float32, the state before the segment.
      since_start: for each token, the number of earlier tokens of its document, as
        `brt.memories.convolution.tokens_since_start` returns it.

    Returns:
      The vectors that the tokens read from the state, and the state after the segment, both
      float32.
    """

    def body(state: Array, inputs: tuple[DeltaInputs, Array]) -> tuple[Array, Array]:
        """Returns the state after a token, and the vectors [B, H, V] that the token reads.

        `inputs` has the inputs of the rule for the token, and the number of earlier tokens of the
        token's document.
        """
        token, since = inputs
        state = jnp.where((since == 0)[:, None, None, None], 0, state)
        read, state = delta_step(DeltaInputs(*(x[:, None] for x in token)), state)
        return state, read[:, 0]

    by_token = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (tokens, since_start))
    state, read = jax.lax.scan(body, state, by_token)
    return jnp.moveaxis(read, 0, 1), state
