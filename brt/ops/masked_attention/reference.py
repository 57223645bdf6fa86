"""Masked attention with all logits at once."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from brt.ops.partial_attention import AttentionPart
from brt.ops.softmax import FLOOR, masked_softmax


def attend_part(
    queries: Float[Array, "*B Q H K"],
    keys: Float[Array, "*B S H K"],
    values: Float[Array, "*B S H K"],
    bias: Float[Array, "H Q S"] | None,
    mask: Bool[Array, "*#B #Q S"],
    dropout: None = None,
) -> AttentionPart:
    """Implements `api.attend` and `api.attend_part`."""
    mask = jnp.broadcast_to(mask, (*queries.shape[:-3], *mask.shape[-2:]))
    logits = jnp.einsum("...qhk,...shk->...hqs", queries, keys, preferred_element_type=jnp.float32)
    if bias is not None:
        logits += bias.reshape((1,) * (logits.ndim - 3) + bias.shape)
    mask = mask[..., None, :, :]
    weights = masked_softmax(logits, mask).astype(values.dtype)
    lse = jnp.logaddexp(jax.nn.logsumexp(logits, axis=-1, where=mask), FLOOR)
    output = jnp.einsum("...hqs,...shk->...qhk", weights, values)
    return AttentionPart(output, lse.swapaxes(-2, -1))
