"""Softmax attention over all keys, differentiated by autodiff.

The leading axes *B have the rows of the batch and, if there are several, their blocks.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def attention(
    q: Float[Array, "*B H Q K"],
    k: Float[Array, "*B H S K"],
    v: Float[Array, "*B H S K"],
    cache_mask: Bool[Array, " B"] | None,
) -> Float[Array, "*B H Q K"]:
    """Implements `api.attend`, or `api.attend_to_blocks` if there is a `cache_mask`."""
    logits = jnp.einsum("...qk,...sk->...qs", q, k, preferred_element_type=jnp.float32)
    if cache_mask is None:
        return jax.nn.softmax(logits).astype(v.dtype) @ v
    size = k.shape[-2]
    mask = cache_mask[:, None, None, None] | (jnp.arange(size) >= size // 2)[None, None, None]
    return jax.nn.softmax(jnp.where(mask, logits, -jnp.inf)).astype(v.dtype) @ v
