"""The meaning of token logits."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brt.ops.token_logits.scored import Scored


def token_logits(
    hidden: Float[Array, "B C D"],
    embedding: Float[Array, "V D"],
    targets: Int[Array, "B C"],
    bias: Float[Array, " V"] | None,
    *,
    scale: float,
) -> Scored:
    """See `api.token_logits`."""
    logits = scale * jnp.einsum("bcd,vd->bcv", hidden, embedding)
    logits = logits if bias is None else logits + bias[None, None]
    probabilities = jax.nn.softmax(logits)
    nats = -jnp.log(jnp.sum(probabilities * jax.nn.one_hot(targets, logits.shape[-1]), axis=-1))
    return Scored(nats, logits, jnp.log(jnp.sum(jnp.exp(logits), axis=-1)))
