"""Softmax attention to the keys where a mask is True.

In shapes, Q and T are numbers of queries, S and X are numbers of keys, H is the number of heads of
queries, and K the number of numbers of a head. G is the number of heads of keys and values, if it
differs from H. B is the number of rows of the batch, and *B stands for any leading axes.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from brt.ops import dispatch
from brt.ops.dispatch import Implementation, Op
from brt.ops.dropout import Dropout
from brt.ops.grouped_heads import heads_to_tokens, tokens_to_heads
from brt.ops.masked_attention import pallas_gpu, pallas_tpu, reference, xla
from brt.ops.partial_attention import AttentionPart

OP = Op(
    "masked_attention",
    (
        Implementation(
            "pallas_tpu", pallas_tpu.attend_part, ("tpu",), ("tpu",), pallas_tpu.refusal
        ),
        Implementation(
            "pallas_gpu", pallas_gpu.attend_part, ("gpu",), ("gpu",), pallas_gpu.refusal
        ),
        Implementation("xla", xla.attend_part),
        Implementation(
            "pallas_gpu_interpret",
            pallas_gpu.interpreted,
            auto=(),
            refusal=dispatch.dropout_refusal,
        ),
        Implementation(
            "pallas_interpret", pallas_tpu.interpreted, auto=(), refusal=dispatch.dropout_refusal
        ),
        Implementation(
            "reference", reference.attend_part, auto=(), refusal=dispatch.dropout_refusal
        ),
    ),
)  # fmt: skip


def attend(
    queries: Float[Array, "*B Q H K"],
    keys: Float[Array, "*B S H K"],
    values: Float[Array, "*B S H K"],
    bias: Float[Array, "H Q S"] | None,
    mask: Bool[Array, "*#B #Q S"],
    dropout: Dropout | None = None,
    *,
    implementation: str | None = None,
) -> Float[Array, "*B Q H K"]:
    """Returns the attention output of every query over the keys that it sees.

    The logits are q.k + bias, without a scale.

    Args:
      queries: already multiplied by any scale.
      keys: the keys.
      values: the values.
      bias: float32, added to the logits along all leading axes; None for no bias.
      mask: True where a query sees a key; a query that sees no key gets zeros.
      dropout: dropout of the attention weights; None for no dropout.
      implementation: the name of an implementation; None selects the best one that supports the
        inputs.

    Returns:
      The outputs in the dtype of `values`, with the softmax in float32.

    Raises:
      NotImplementedError: the implementation does not exist or does not support the inputs.
    """
    return dispatch.run(
        OP, implementation, queries, keys, values, bias, mask, dropout=dropout
    ).output  # fmt: skip


def attend_part(
    queries: Float[Array, "B Q H K"],
    keys: Float[Array, "B S G K"],
    values: Float[Array, "B S G K"],
    mask: Bool[Array, "B #Q S"],
    dropout: Dropout | None = None,
    *,
    implementation: str | None = None,
) -> AttentionPart:
    """Returns the attention output [B, Q, H, K] of every query over the keys that it sees, and the
    log-sum-exp of the query's logits, float32 [B, Q, H].

    With the log-sum-exp, `partial_attention.merge_parts` can combine the output with attention to
    other keys. The log-sum-exp of a query that sees no key is `softmax.FLOOR`. The logits are q.k.
    Each head of keys serves H / G consecutive heads of queries, and no key is repeated in memory.

    Args:
      queries: already multiplied by any scale.
      keys, values: the keys and the values.
      mask: True where a query sees a key; a query that sees no key gets zeros.
      dropout: dropout of the attention weights; None for no dropout.
      implementation: the name of an implementation; None selects the best one that supports the
        inputs.

    Raises:
      NotImplementedError: the implementation does not exist or does not support the inputs.
    """
    heads, groups = queries.shape[2], keys.shape[2]
    if mask.shape[1] > 1:
        mask = jnp.repeat(mask, heads // groups, axis=1)
    queries = heads_to_tokens(queries, groups)
    part = dispatch.run(OP, implementation, queries, keys, values, None, mask, dropout=dropout)
    return AttentionPart(*(tokens_to_heads(x, heads) for x in part))


def attend_to_valid(
    queries: Float[Array, "B T H K"],
    keys: Float[Array, "B X H K"],
    values: Float[Array, "B X H K"],
    valid: Bool[Array, "B X"],
    dropout: Dropout | None = None,
    *,
    scale: float,
    causal: bool = False,
    implementation: str | None = None,
) -> Float[Array, "B T H K"]:
    """Returns the attention output of every query over all valid keys, in the dtype of `values`.

    The logits are scale * q.k.

    Args:
      queries: unscaled queries.
      keys: the keys.
      values: the values.
      valid: False for padding, which no query sees. A query that sees no key gets zeros.
      dropout: dropout of the attention weights; None for no dropout.
      scale: the factor of the logits.
      causal: True hides the keys of later tokens; queries and keys must then be of the same tokens.
      implementation: the name of an implementation; None selects the best one that supports the
        inputs.
    """
    mask = valid_mask(valid, queries.shape[1], causal)
    return attend(queries * scale, keys, values, None, mask, dropout, implementation=implementation)


def valid_mask(valid: Bool[Array, "B X"], tokens: int, causal: bool) -> Bool[Array, "B #T X"]:
    """Returns the mask of visible keys for `attend`, True where a query sees a key.

    Args:
      valid: False for padding, which no query sees.
      tokens: T, the number of queries.
      causal: True hides the keys after a query; query t and key t then belong to the same token.

    Returns:
      A mask [B, T, X] if `causal` is True. Otherwise all queries have the same mask, and the shape
      is [B, 1, X].
    """
    if not causal:
        return valid[:, None]
    return valid[:, None] & np.tri(tokens, valid.shape[1], dtype=bool)[None]
