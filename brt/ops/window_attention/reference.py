"""Window attention in which a block's W queries mask the logits of 2 W keys."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from brt.ops.softmax import MASKED, softmax_and_lse


def window_attention(
    queries: Float[Array, "B T H K"],
    keys: Float[Array, "B Z H K"],
    values: Float[Array, "B Z H K"],
    bias: Float[Array, "H W"] | None,
    cache_mask: Bool[Array, "B N"],
    dropout: Float[Array, "H W W"] | None,
    *,
    attend_to_self: bool,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B T H"]]:
    """Implements `api.window_part`; cached keys come first, and dropout has factors of weights."""
    window, blocks = keys.shape[1] - queries.shape[1], cache_mask.shape[1]
    nearest = 0 if attend_to_self else 1
    # The rows of `distance` are the queries of a block. The columns are the keys of the previous
    # block, followed by the keys of the block itself.
    distance = np.arange(window)[:, None] + window - np.arange(2 * window)[None, :]
    seen = (distance >= nearest) & (distance < window + nearest)
    tile = 0.0 if bias is None else bias[None, :, np.where(seen, distance - nearest, 0)]
    previous = np.arange(2 * window) < window
    slot = np.arange(2 * window) % window

    outputs, lses = [], []
    for n in range(blocks):
        q = queries[:, n * window : (n + 1) * window]
        k = keys[:, n * window : (n + 2) * window]
        v = values[:, n * window : (n + 2) * window]
        # The axes of `usable` are [B, 2W].
        usable = cache_mask[:, n, None] | ~previous[None]
        logits = jnp.einsum("bqhk,bshk->bhqs", q, k, preferred_element_type=jnp.float32)
        mask = seen[None, None] & usable[:, None, None]
        weights, lse = softmax_and_lse(jnp.where(mask, logits + tile, MASKED))
        lses.append(lse.swapaxes(1, 2))
        if dropout is not None:
            weights = weights * dropout[None][:, :, :, slot]
        outputs.append(jnp.einsum("bhqs,bshk->bqhk", weights.astype(v.dtype), v))
    return jnp.concatenate(outputs, axis=1), jnp.concatenate(lses, axis=1)
