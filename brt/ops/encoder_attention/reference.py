"""Local attention of encoders with all T x T logits, most of them masked."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from brt.ops.encoder_attention.globals import GlobalKeys
from brt.ops.softmax import masked_softmax


def local_attention(
    queries: Float[Array, "B T H K"],
    keys: Float[Array, "B T H K"],
    values: Float[Array, "B T H K"],
    bias: Float[Array, "H W X"] | None,
    mask: Bool[Array, "B T"],
    global_keys: GlobalKeys | None = None,
    dropout: None = None,
    *,
    radius: int,
) -> Float[Array, "B T H K"]:
    place = np.arange(queries.shape[1])
    offset = place[None, :] - place[:, None]
    near = np.abs(offset) <= radius
    logits = jnp.einsum("bqhk,bshk->bhqs", queries, keys, preferred_element_type=jnp.float32)
    if bias is not None:
        # The bias depends only on o, the key's position minus the query's position, so it can be
        # read from any row of `bias` that has this offset. Let r be the radius. Column c of row i
        # has the offset c - (r + 1) - i. If the key is before the query, row r is read at column
        # 2 r + 1 + o; otherwise, row 0 is read at column r + 1 + o.
        within = np.clip(offset, -radius, radius)
        row = np.where(within < 0, radius, 0)
        logits += bias[:, row, within + row + radius + 1][None]
    seen = jnp.broadcast_to((mask[:, None] & near[None])[:, None], logits[:, :1].shape)
    if global_keys is not None:
        more = jnp.einsum("bqhk,bghk->bhqg", queries, global_keys.keys)
        more = more if global_keys.bias is None else more + global_keys.bias
        logits = jnp.concatenate([logits, more], axis=-1)
        exist = jnp.broadcast_to(global_keys.exist[:, None, None], more[:, :1].shape)
        seen = jnp.concatenate([seen, exist], axis=-1)
        values = jnp.concatenate([values, global_keys.values], axis=1)
    weights = masked_softmax(logits, seen).astype(values.dtype)
    return jnp.einsum("bhqs,bshk->bqhk", weights, values)
