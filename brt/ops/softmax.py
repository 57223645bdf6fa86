"""Softmax functions that return zeros instead of NaN where all logits are masked.

In shapes, S is the number of logits of a row, and *B stands for any leading axes.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

MASKED = -1e6
# A virtual logit of this value, far below real logits and far above MASKED, is added to every row.
# In a row without visible keys the virtual logit has all the probability, and in other rows it has
# none, as in `safe_softmax` of the original code.
FLOOR = -1000.0


def safe_softmax(logits: Float[Array, "*B S"]) -> Float[Array, "*B S"]:
    """Returns the softmax over the last axis, float32; a row whose logits are all MASKED becomes
    zeros.
    """
    return softmax_and_lse(logits)[0]


def softmax_and_lse(
    logits: Float[Array, "*B S"],
) -> tuple[Float[Array, "*B S"], Float[Array, "*B"]]:
    """Returns the result of `safe_softmax` and the log-sum-exp of the logits, both float32.

    The log-sum-exp of a row with only MASKED logits is FLOOR.
    """
    logits = logits.astype(jnp.float32)
    top = jnp.maximum(jnp.max(logits, axis=-1, keepdims=True), FLOOR)
    top = jax.lax.stop_gradient(top)
    weights = jnp.exp(logits - top)
    sums = jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(FLOOR - top)
    return weights / sums, (top + jnp.log(sums))[..., 0]


def masked_softmax(
    logits: Float[Array, "*B S"], mask: Bool[Array, "*#B S"]
) -> Float[Array, "*B S"]:
    """Returns the softmax of the logits over the last axis, float32.

    Only entries where the mask is True count.

    Entries where the mask is False are zero in the result.
    """
    logits = jnp.where(mask, logits.astype(jnp.float32), jnp.finfo(jnp.float32).min)
    return jnp.where(mask, jax.nn.softmax(logits, axis=-1), 0.0)
