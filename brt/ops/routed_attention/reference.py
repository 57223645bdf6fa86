"""The meaning of routed attention: every token and every place, and a mask; float32."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from brt.ops.partial_attention import attend_to_part
from brt.ops.routed_attention.rings import Rings, Routed, places
from brt.ops.softmax import MASKED


def routed_attention(
    queries: Float[Array, "B T H K"],
    tokens: Routed,
    rings: Rings,
    document_start: Bool[Array, "B N"],
    bias: Float[Array, "H R"],
    *,
    attend_to_self: bool,
) -> Float[Array, "B T H K"]:
    """See `api.routed_attention`."""
    here = places(tokens, rings, document_start)
    count, reach = queries.shape[1], bias.shape[1]
    total = here.groups.shape[-1]
    place = jnp.arange(total)
    own = place[-count:]
    same = here.groups[:, :, -count:, None] == here.groups[:, :, None]
    same &= (place[None] <= own[:, None])[None, None]
    # Tokens of the cluster after a place, up to the token itself: how far back the place is.
    back = jnp.sum(same, axis=-1, keepdims=True) - jnp.cumsum(same, axis=-1)
    back -= 0 if attend_to_self else 1
    seen = same & (back >= 0) & (back < reach)
    far = jnp.clip(back, 0, reach - 1)
    added = jnp.take_along_axis(bias[None, :, None], far.reshape(*far.shape[:2], 1, -1), axis=-1)
    q, k = (x.astype(jnp.float32) for x in (queries.swapaxes(1, 2), here.keys))
    logits = jnp.einsum("bhtk,bhmk->bhtm", q, k) + added.reshape(far.shape)
    y = attend_to_part(jnp.where(seen, logits, MASKED), here.values.astype(jnp.float32)).output
    return y.swapaxes(1, 2).astype(tokens.values.dtype)
