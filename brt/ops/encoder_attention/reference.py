"""Local attention of encoders with all T x T logits, most of them masked."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from brt.ops.attention import reference
from brt.ops.encoder_attention.globals import LocalInputs


def local_attention(
    inputs: LocalInputs, *, dropout: None = None, radius: int
) -> Float[Array, "B T H K"]:
    queries, keys, values, bias, mask, global_keys = inputs
    (batch, tokens, heads), place = queries.shape[:3], np.arange(queries.shape[1])
    offset = place[None, :] - place[:, None]
    seen = mask[:, None] & (np.abs(offset) <= radius)[None]
    if bias is not None:
        # The bias depends only on o, the key's position minus the query's position, so it can be
        # read from any row of `bias` that has this offset. Let r be the radius. Column c of row i
        # has the offset c - (r + 1) - i. If the key is before the query, row r is read at column
        # 2 r + 1 + o; otherwise, row 0 is read at column r + 1 + o.
        within = np.clip(offset, -radius, radius)
        row = np.where(within < 0, radius, 0)
        bias = bias[:, row, within + row + radius + 1][None]
    if global_keys is not None:
        more, exist = global_keys.bias, global_keys.exist
        own = jnp.zeros((1, heads, tokens, tokens)) if bias is None else bias
        more = jnp.zeros((batch, heads, tokens, exist.shape[1])) if more is None else more
        bias = jnp.concatenate([jnp.broadcast_to(own, (batch, *own.shape[1:])), more], axis=-1)
        exist = jnp.broadcast_to(exist[:, None], (batch, tokens, exist.shape[1]))
        seen = jnp.concatenate([seen, exist], axis=-1)
        keys = jnp.concatenate([keys, global_keys.keys], axis=1)
        values = jnp.concatenate([values, global_keys.values], axis=1)
    return reference.attend(queries, keys, values, bias, seen).output
