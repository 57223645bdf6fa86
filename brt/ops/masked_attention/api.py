"""Softmax attention to the keys where a mask is True.

In shapes, Q and T are numbers of queries, and S and X are numbers of keys. H is the number of heads
of queries, and G the number of heads of keys. Each head of keys serves H / G consecutive heads of
queries.
"""

from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from brt.ops import dispatch
from brt.ops.attention import reference
from brt.ops.dispatch import Implementation, Op
from brt.ops.dropout import Dropout
from brt.ops.grouped_heads import heads_to_tokens, tokens_to_heads
from brt.ops.masked_attention import pallas, xla
from brt.ops.partial_attention import AttentionPart

OP = Op(
    "masked_attention",
    (
        Implementation(
            "pallas_tpu", partial(pallas.attend_part, backend="tpu"), partial(pallas.refusal, "tpu")
        ),
        Implementation(
            "pallas_gpu", partial(pallas.attend_part, backend="gpu"), partial(pallas.refusal, "gpu")
        ),
        Implementation("xla", xla.attend_part),
        Implementation(
            "pallas_interpret", partial(pallas.attend_part, backend="tpu", interpret=True),
            dispatch.dropout_refusal,
        ),
        Implementation("reference", reference.attend, dispatch.dropout_refusal),
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

    The logits are q.k + bias. A query that sees no key gets zeros.
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
    """Returns the attention output and the log-sum-exp, for example for `merge_parts`.

    The logits are q.k. Keys that several heads of queries share are not repeated in memory. For a
    query that sees no key, the output is zero and the log-sum-exp is `softmax.FLOOR`.
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
    implementation: str | None = None,
) -> Float[Array, "B T H K"]:
    """Returns the attention output of every query over all valid keys, with logits scale * q.k.

    Queries without keys get zeros.
    """
    return attend(
        queries * scale, keys, values, None, valid[:, None], dropout, implementation=implementation
    )  # fmt: skip
