"""Reference implementation of softmax attention over all keys, differentiated by autodiff.

In shapes, Q is the number of queries of a block, S of keys of a block, H of heads and K of numbers
of a head; *B has the rows of the batch and, if there are several, their blocks.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def attention(
    q: Float[Array, "*B H Q K"],
    k: Float[Array, "*B H S K"],
    v: Float[Array, "*B H S K"],
    cache_mask: Bool[Array, " B"] | None,
    *,
    null_keys: bool,
) -> Float[Array, "*B H Q K"]:
    """Returns the attention output of every query over all readable keys, in the dtype of v.

    Args:
      q: the queries, already multiplied by any scale.
      k, v: the keys and values.
      cache_mask: None if every key is readable. Otherwise the keys are two blocks of S / 2 keys:
        the cached keys of the previous block, and the keys of the queries' own block. The mask is
        True for rows of the batch whose queries may read the cached keys.
      null_keys: True makes keys that `cache_mask` hides count as zero keys with zero values. False
        excludes these keys from the softmax.
    """
    logits = jnp.einsum("...qk,...sk->...qs", q, k, preferred_element_type=jnp.float32)
    if cache_mask is None:
        return jax.nn.softmax(logits).astype(v.dtype) @ v
    size = k.shape[-2]
    mask = cache_mask[:, None, None, None] | (jnp.arange(size) >= size // 2)[None, None, None]
    weights = jax.nn.softmax(jnp.where(mask, logits, 0.0 if null_keys else -jnp.inf))
    return jnp.where(mask, weights, 0).astype(v.dtype) @ v
