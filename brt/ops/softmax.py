"""A softmax that gives zeros, not NaN, where every logit is masked."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

MASKED = -1e6
# A virtual logit far below real ones and far above MASKED: it takes all the mass of a
# row without keys and none of any other (the original's `safe_softmax`).
FLOOR = -1000.0


def safe_softmax(logits: Float[Array, "*B S"]) -> Float[Array, "*B S"]:
    """Softmax over the last axis in float32; rows of only MASKED logits give zeros."""
    return softmax_and_lse(logits)[0]


def softmax_and_lse(
    logits: Float[Array, "*B S"],
) -> tuple[Float[Array, "*B S"], Float[Array, "*B"]]:
    """The same, and the logarithm of the sum of exp(logit); FLOOR of only MASKED logits."""
    logits = logits.astype(jnp.float32)
    top = jnp.maximum(jnp.max(logits, axis=-1, keepdims=True), FLOOR)
    top = jax.lax.stop_gradient(top)
    weights = jnp.exp(logits - top)
    sums = jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(FLOOR - top)
    return weights / sums, (top + jnp.log(sums))[..., 0]


def masked_softmax(
    logits: Float[Array, "*B S"], mask: Bool[Array, "*#B S"]
) -> Float[Array, "*B S"]:
    """Softmax in float32 over where the mask is True; zeros elsewhere, and in rows without True."""
    logits = jnp.where(mask, logits.astype(jnp.float32), jnp.finfo(jnp.float32).min)
    return jnp.where(mask, jax.nn.softmax(logits, axis=-1), 0.0)
