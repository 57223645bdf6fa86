"""Reference implementation of routed attention (see `api.py`): it computes the logits of all pairs
of a query and a key, in float32, and masks those that a query must not read.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from brt.memories.routing.routed_attention.rings import Rings, RoutedTokens, readable_tokens
from brt.ops.partial_attention import attend_to_part
from brt.ops.softmax import MASKED


def routed_attention(
    queries: Float[Array, "B T H K"],
    tokens: RoutedTokens,
    rings: Rings,
    document_start: Bool[Array, "B N"],
    bias: Float[Array, "H R"],
    *,
    attend_to_self: bool,
) -> Float[Array, "B T H K"]:
    """Computes `api.routed_attention` with a logit for every pair of a query and a key."""
    visible = readable_tokens(tokens, rings, document_start)
    count, bias_length = queries.shape[1], bias.shape[1]
    total = visible.groups.shape[-1]
    place = jnp.arange(total)
    own = place[-count:]
    same = visible.groups[:, :, -count:, None] == visible.groups[:, :, None]
    same &= (place[None] <= own[:, None])[None, None]
    # The distance between a key and a query of the same cluster is the number of the cluster's
    # tokens after the key, up to and including the query.
    back = jnp.sum(same, axis=-1, keepdims=True) - jnp.cumsum(same, axis=-1)
    back -= 0 if attend_to_self else 1
    seen = same & (back >= 0) & (back < bias_length)
    far = jnp.clip(back, 0, bias_length - 1)
    added = jnp.take_along_axis(bias[None, :, None], far.reshape(*far.shape[:2], 1, -1), axis=-1)
    q, k = (x.astype(jnp.float32) for x in (queries.swapaxes(1, 2), visible.keys))
    logits = jnp.einsum("bhtk,bhmk->bhtm", q, k) + added.reshape(far.shape)
    y = attend_to_part(jnp.where(seen, logits, MASKED), visible.values.astype(jnp.float32)).output
    return y.swapaxes(1, 2).astype(tokens.values.dtype)
