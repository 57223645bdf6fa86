"""Token logits in plain XLA."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brt.distributed.rules import constrain
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
    logits = scale * jnp.einsum(
        "bcd,vd->bcv", hidden, embedding.astype(hidden.dtype), preferred_element_type=jnp.float32
    )
    if bias is not None:
        logits += bias[None, None]
    logits = constrain(logits, "lanes", "tokens", "vocab")
    lse = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return Scored(lse - chosen, logits, lse)
