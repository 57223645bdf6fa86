"""Window attention with the logits of all Z = W + T keys, most of them masked."""

import jax.numpy as jnp

from brt.ops.attention import reference
from brt.ops.partial_attention import AttentionPart
from brt.ops.window_attention.inputs import WindowInputs


def window_attention(
    inputs: WindowInputs, *, attend_to_self: bool, soft_cap: float = 0.0
) -> AttentionPart:
    """Implements `api.local_attention`; `inputs.dropout` is None or a `DropoutMask`."""
    queries, keys, values = inputs.joined()
    length, window, factors = queries.shape[1], inputs.window, None
    keys, values = (jnp.repeat(x, queries.shape[2] // x.shape[2], axis=2) for x in (keys, values))
    token, place = jnp.arange(length)[:, None], jnp.arange(-window, length)[None]
    steps = token - place - (0 if attend_to_self else 1)
    seen = ((steps >= 0) & (steps < window))[None] & (place[None] >= inputs.starts()[..., None])
    bias = inputs.bias
    if bias is not None:
        bias = jnp.take(bias, jnp.clip(steps, 0, window - 1), axis=1)
    if inputs.dropout is not None:
        factors = inputs.dropout.factors(jnp.dtype("float32"))
        factors = factors[:, token % window, place % window]
    return reference.attend(queries, keys, values, bias, seen, factors=factors, soft_cap=soft_cap)
