"""A softmax that gives zeros, not NaN, where every logit is masked."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

MASKED = -1e6
# A virtual logit far below real ones and far above MASKED: it takes all the mass of a
# row without keys and none of any other (the original's `safe_softmax`).
_FLOOR = -1000.0


def safe_softmax(logits: Float[Array, "*B S"]) -> Float[Array, "*B S"]:
    """Softmax over the last axis in float32; rows of only MASKED logits give zeros."""
    logits = logits.astype(jnp.float32)
    top = jnp.maximum(jnp.max(logits, axis=-1, keepdims=True), _FLOOR)
    top = jax.lax.stop_gradient(top)
    weights = jnp.exp(logits - top)
    return weights / (jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(_FLOOR - top))
