"""Softmax functions that return zeros instead of NaN where all logits are masked."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

# Callers set the logits of keys that a query must not see to this value.
MASKED = -1e6
# The function `softmax_and_lse` adds a logit of this value, which belongs to no key, to each row.
# The value is far below real logits and far above MASKED. In a row without visible keys the
# additional logit therefore takes all the probability, and in other rows none. The original code of
# the block-recurrent transformer does the same in its function `safe_softmax`.
FLOOR = -1000.0


def safe_softmax(logits: Float[Array, "*B S"]) -> Float[Array, "*B S"]:
    """Returns the softmax over the last axis, float32, with zeros where all logits are MASKED."""
    return softmax_and_lse(logits)[0]


def softmax_and_lse(
    logits: Float[Array, "*B S"],
) -> tuple[Float[Array, "*B S"], Float[Array, "*B"]]:
    """Returns `safe_softmax` and the float32 log-sum-exp (FLOOR where all logits are MASKED)."""
    logits = logits.astype(jnp.float32)
    top = jnp.maximum(jnp.max(logits, axis=-1, keepdims=True), FLOOR)
    top = jax.lax.stop_gradient(top)
    weights = jnp.exp(logits - top)
    sums = jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(FLOOR - top)
    return weights / sums, (top + jnp.log(sums))[..., 0]


def soft_capped(logits: Float[Array, "..."], cap: float) -> Float[Array, "..."]:
    """Returns cap * tanh(logits / cap), or the logits if `cap` is 0."""
    return cap * jnp.tanh(logits / cap) if cap else logits


def masked_softmax(
    logits: Float[Array, "*B S"], mask: Bool[Array, "*#B S"]
) -> Float[Array, "*B S"]:
    """Returns the float32 softmax over the logits where the mask is True, and zeros elsewhere."""
    logits = jnp.where(mask, logits.astype(jnp.float32), jnp.finfo(jnp.float32).min)
    return jnp.where(mask, jax.nn.softmax(logits, axis=-1), 0.0)
