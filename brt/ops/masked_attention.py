"""Softmax attention under a mask: encoder, decoder and cached decoder alike."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

Dropout = Callable[[Array], Array]  # of attention weights


def masked_softmax(
    logits: Float[Array, "*B S"], seen: Bool[Array, "*#B S"]
) -> Float[Array, "*B S"]:
    """Softmax over the last axis in float32; zeros where nothing is seen, and in all such rows."""
    logits = jnp.where(seen, logits.astype(jnp.float32), jnp.finfo(jnp.float32).min)
    return jnp.where(seen, jax.nn.softmax(logits, axis=-1), 0.0)


def attend(
    queries: Float[Array, "*B Q H K"],
    keys: Float[Array, "*B S H K"],
    values: Float[Array, "*B S H K"],
    bias: Float[Array, "H Q S"] | None,
    seen: Bool[Array, "*#B #Q S"],
    dropout: Dropout | None = None,
) -> Float[Array, "*B Q H K"]:
    """Attention of every query to the keys it sees; logits are q.k + bias, unscaled.

    Args:
      bias: float32, shared by all leading axes.
      seen: a query that sees nothing gives zeros.
      dropout: applied to the weights [*B, H, Q, S].

    Returns:
      In the dtype of `values`; softmax in float32.
    """
    logits = jnp.einsum("...qhk,...shk->...hqs", queries, keys, preferred_element_type=jnp.float32)
    if bias is not None:
        logits += bias.reshape((1,) * (logits.ndim - 3) + bias.shape)
    weights = masked_softmax(logits, seen[..., None, :, :]).astype(values.dtype)
    if dropout is not None:
        weights = dropout(weights)
    return jnp.einsum("...hqs,...shk->...qhk", weights, values)
