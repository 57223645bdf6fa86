"""Window attention with the logits of all Z = W + T keys, most of them masked."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brt.ops.dropout import DropoutMask
from brt.ops.partial_attention import AttentionPart
from brt.ops.softmax import MASKED, softmax_and_lse


def window_attention(
    queries: Float[Array, "B T H K"],
    keys: Float[Array, "B Z G K"],
    values: Float[Array, "B Z G K"],
    bias: Float[Array, "H W"] | None,
    first: Int[Array, "B N"],
    dropout: DropoutMask | None = None,
    *,
    attend_to_self: bool,
) -> AttentionPart:
    """Implements `api.local_part`; the keys begin with the cached ones."""
    length, members = queries.shape[1], queries.shape[2] // keys.shape[2]
    window = keys.shape[1] - length
    keys, values = (jnp.repeat(x, members, axis=2) for x in (keys, values))
    token, place = jnp.arange(length)[:, None], jnp.arange(-window, length)[None]
    steps = token - place - (0 if attend_to_self else 1)
    start = jnp.repeat(first, length // first.shape[1], axis=1)
    # The axes of `seen` are [B, T, Z].
    seen = ((steps >= 0) & (steps < window))[None] & (place[None] >= start[..., None])
    logits = jnp.einsum("bqhk,bzhk->bhqz", queries, keys, preferred_element_type=jnp.float32)
    if bias is not None:
        logits += jnp.take(bias, jnp.clip(steps, 0, window - 1), axis=1)[None]
    weights, lse = softmax_and_lse(jnp.where(seen[:, None], logits, MASKED))
    if dropout is not None:
        weights *= dropout.factors(weights.dtype)[:, token % window, place % window][None]
    output = jnp.einsum("bhqz,bzhk->bqhk", weights.astype(values.dtype), values)
    return AttentionPart(output, lse.swapaxes(1, 2))
