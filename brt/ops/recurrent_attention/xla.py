"""Attention of the recurrent cell's states in plain XLA."""

from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from brt.ops.normalization import scaled_unit
from brt.ops.recurrent_attention import scan
from brt.ops.recurrent_attention.cell import StateKV, TokenKV
from brt.ops.softmax_attention import attend, attend_to_blocks


def state_attention(
    projected: Float[Array, "B S 4 H K"],
    scales: Float[Array, "2 H"],
    before: TokenKV,
    own: TokenKV,
    cache_mask: Bool[Array, " B"],
    *,
    normalize_qk: bool,
    null_keys: bool,
    attention: str | None = None,
) -> tuple[Float[Array, "B S 2 H K"], StateKV]:
    """Returns the attention outputs of the states, and the keys and values of the states.

    Axis 2 of the outputs has first attention to the states, then attention to the tokens.

    Args:
      projected: on axis 2, the states' keys, queries to states, queries to tokens, and values.
      scales: two factors per head: of its queries to states, and of its queries to tokens.
      before, own: keys and values of the tokens of the previous block and of this block. With
        `normalize_qk`, these keys are already normalized.
      cache_mask: True if the states may read the tokens of the previous block.
    """
    scaled, v = projected[:, :, :-1], projected[:, :, -1]
    scales = jnp.concatenate([jnp.ones_like(scales[:1]), scales])
    if normalize_qk:
        scaled = scaled_unit(scaled, scales)
    else:
        scaled = scaled * scales.astype(scaled.dtype)[None, None, :, :, None]
    k, q, to_tokens = (part.squeeze(2) for part in jnp.split(scaled, 3, axis=2))
    keys, values = (jnp.concatenate(pair, axis=2) for pair in zip(before, own, strict=True))
    crossed = attend_to_blocks(
        to_tokens, keys, values, cache_mask, null_keys=null_keys, implementation=attention
    )
    return jnp.stack([attend(q, k, v, implementation=attention), crossed], axis=2), StateKV(k, v)


state_update = partial(scan.state_update, read=state_attention)
state_scan = partial(scan.state_scan, read=state_attention)
