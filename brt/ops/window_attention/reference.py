"""Reference implementation of window attention: each block computes the logits of its W queries and
the 2 W keys of the block before and of the block itself, and masks those outside the window.

In shapes, B is the number of rows of the batch, H of heads, K of numbers of a head, T of tokens of
a segment, and N of its blocks of W tokens; Z = W + T includes the tokens of the cached block.
"""

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
    null_keys: bool,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B T H"]]:
    """Returns the attention output of every token over the token's window, and the log-sum-exp of
    the token's logits.

    Args:
      queries: already multiplied by any scale.
      keys, values: the keys and values of the cached block, followed by those of the segment.
      bias: the bias of each head and distance; column 0 is for the nearest key that a token sees.
      cache_mask: True where block n may read the block before it.
      dropout: factors of the weights by head, query of a block and slot; None for no dropout. A
        query has W slots, because it sees exactly W of the 2 W keys of its own block and the block
        before: slot c is key c of the own block if the query sees this key, and otherwise key c of
        the block before.
      attend_to_self: True if the nearest key is the token itself, False if it is the token before.
      null_keys: True if keys that `cache_mask` hides count as zero keys with zero values.
    """
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
        if null_keys:
            logits = jnp.where(usable[:, None, None], logits, 0.0)
            v = jnp.where(usable[:, :, None, None], v, 0)
            mask = seen[None, None]
        else:
            mask = seen[None, None] & usable[:, None, None]
        weights, lse = softmax_and_lse(jnp.where(mask, logits + tile, MASKED))
        lses.append(lse.swapaxes(1, 2))
        if dropout is not None:
            weights = weights * dropout[None][:, :, :, slot]
        outputs.append(jnp.einsum("bhqs,bshk->bqhk", weights.astype(v.dtype), v))
    return jnp.concatenate(outputs, axis=1), jnp.concatenate(lses, axis=1)
