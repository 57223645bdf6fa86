"""Attention of every token to the last W tokens of its document, itself included.

`brt.ops.window_attention` computes the same for blocks of exactly W tokens, which is faster. Here
the window and the length of a block are independent.

In shapes, B is the number of rows of the batch, T of tokens of a segment, N of its blocks, H of
heads of queries, G of heads of keys, and K of numbers of a head. A head of keys serves H / G
consecutive heads of queries.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brt.ops.dropout import Dropout
from brt.ops.grouped_heads import step_logits, weighted_values
from brt.ops.local_attention import xla
from brt.ops.normalization import l2_normalize, scaled_unit
from brt.ops.partial_attention import AttentionPart
from brt.ops.softmax import MASKED, softmax_and_lse


def local_attention(
    queries: Float[Array, "B T H K"],
    cached: tuple[Float[Array, "B W G K"], Float[Array, "B W G K"]],
    keys: Float[Array, "B T G K"],
    values: Float[Array, "B T G K"],
    bias: Float[Array, "H W"] | None,
    first: Int[Array, "B N"],
    dropout: Dropout | None = None,
    *,
    attend_to_self: bool = True,
    scale: Float[Array, " H"] | None = None,
) -> AttentionPart:
    """Returns the attention output of every token over its window, and the log-sum-exp of its
    logits.

    The logits are q.k + bias.

    Args:
      queries: the queries. Without the argument `scale`, the caller has already multiplied them by
        the factor of the logits.
      cached: keys and values of the W tokens before the segment, oldest first.
      keys, values: keys and values of the segment.
      bias: float32, by distance; column 0 is the nearest key that a token sees. None stands for no
        bias.
      first: for each of N blocks, the place of the first token of its document; the segment begins
        at place 0, and cached tokens have negative places.
      dropout: dropout of the attention weights.
      attend_to_self: True if the nearest key is the token itself.
      scale: if not None, keys are normalized first, and queries are normalized to this length.

    Returns:
      The attention output [B, T, H, K] in the dtype of `values`, with zeros where a token sees no
        key, and the float32 log-sum-exp [B, T, H] of the logits.
    """
    keys, values = (
        jnp.concatenate(pair, axis=1) for pair in zip(cached, (keys, values), strict=True)
    )
    if scale is not None:
        queries, keys = scaled_unit(queries, scale), l2_normalize(keys)
    by_token = jnp.repeat(first, queries.shape[1] // first.shape[1], axis=1)
    return xla.local_attention(
        queries, keys, values, bias, by_token, dropout, attend_to_self=attend_to_self
    )


def local_attention_step(
    query: Float[Array, "B H K"],
    keys: Float[Array, "B W G K"],
    values: Float[Array, "B W G K"],
    bias: Float[Array, "H W"] | None,
    read: Int[Array, " B"],
    position: Int[Array, ""],
    *,
    attend_to_self: bool = True,
    normalize_keys: bool = False,
) -> AttentionPart:
    """Returns the attention output of one token over its window, and the log-sum-exp of its logits.

    Args:
      query: the query, already normalized and multiplied by any scale.
      keys, values: ring buffers of W slots. The token at place p of the open block is written to
        slot p % W, where it replaces the token W places before it. If tokens see themselves, the
        token's own key and value have already been written; otherwise they have not.
      bias: float32, by distance, as in `local_attention`.
      read: the number of tokens of the document before this token.
      position: the place of the token in the open block, the block that is not yet complete.
      attend_to_self: True if the nearest key is the token itself.
      normalize_keys: True if the keys are normalized before the logits are computed.

    Returns:
      The output [B, H, K] in the dtype of `values` and the log-sum-exp [B, H], float32.
    """
    window, nearest = keys.shape[1], 0 if attend_to_self else 1
    # `steps` is the number of tokens from each slot's key to the nearest visible key.
    steps = (position - nearest - jnp.arange(window)) % window
    # The axes of `seen` are [B, 1, W].
    seen = ((steps + nearest)[None] <= read[:, None])[:, None]
    logits = step_logits(query, keys, normalize_keys=normalize_keys)
    if bias is not None:
        logits += jnp.take(bias, steps, axis=1)[None]
    weights, lse = softmax_and_lse(jnp.where(seen, logits, MASKED))
    return AttentionPart(weighted_values(weights, values), lse)
