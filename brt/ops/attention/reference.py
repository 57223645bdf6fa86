"""Attention with all logits at once, with which other implementations are compared."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from brt.ops.partial_attention import AttentionPart
from brt.ops.softmax import MASKED, masked_softmax, soft_capped, softmax_and_lse


def attend(
    queries: Float[Array, "*B Q H K"],
    keys: Float[Array, "*B S H K"],
    values: Float[Array, "*B S H K"],
    bias: Float[Array, "*#C H Q S"] | None,
    mask: Bool[Array, "*#B #Q S"],
    dropout: None = None,
    *,
    factors: Float[Array, "H Q S"] | None = None,
    soft_cap: float = 0.0,
) -> AttentionPart:
    """Returns the attention of every query to the keys where the mask is True.

    The logits are q.k, capped by `soft_cap`, plus the bias. The axes *C of the bias are the last
    ones of the axes *B. The weights are multiplied by `factors`. A query that sees no key gets the
    output zero and the log-sum-exp `softmax.FLOOR`.
    """
    logits = jnp.einsum("...qhk,...shk->...hqs", queries, keys, preferred_element_type=jnp.float32)
    logits = soft_capped(logits, soft_cap)
    if bias is not None:
        logits += jnp.expand_dims(bias, range(logits.ndim - bias.ndim))
    mask = jnp.broadcast_to(mask, (*queries.shape[:-3], *mask.shape[-2:]))[..., None, :, :]
    weights = masked_softmax(logits, mask)
    _, lse = softmax_and_lse(jnp.where(mask, logits, MASKED))
    if factors is not None:
        weights *= jnp.expand_dims(factors, range(weights.ndim - 3))
    output = jnp.einsum("...hqs,...shk->...qhk", weights.astype(values.dtype), values)
    return AttentionPart(output, lse.swapaxes(-2, -1))
