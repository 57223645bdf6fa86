"""Causal attention of every token to W keys of its document.

The keys are those of the token itself and the W - 1 tokens before it, or those of the W tokens
before it. `brt.ops.window_attention` computes the same for blocks of exactly W tokens, which is
faster. Here the window and the length of a block are independent. The kernels of window attention
are used here, too. They process W tokens at a time and mask the keys of other documents.

In shapes, B is the number of rows of the batch, T of tokens of a segment, N of its blocks, H of
heads of queries, G of heads of keys, and K of numbers of a head. A head of keys serves H / G
consecutive heads of queries.
"""

from jaxtyping import Array, Float, Int

from brt.distributed import rules
from brt.ops import dispatch
from brt.ops.dispatch import Implementation, Op
from brt.ops.dropout import Dropout
from brt.ops.local_attention import reference, xla
from brt.ops.partial_attention import AttentionPart
from brt.ops.window_attention import DOCUMENT_KERNELS, on_each_device, with_joined_keys

OP = Op(
    "local_attention",
    (
        *DOCUMENT_KERNELS,
        Implementation("xla", with_joined_keys(xla.local_attention)),
        Implementation(
            "reference", with_joined_keys(reference.local_attention), auto=(),
            refusal=dispatch.dropout_refusal,
        ),
    ),
)  # fmt: skip


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
    implementation: str | None = None,
) -> AttentionPart:
    """Returns the attention output of every token over its window, and the log-sum-exp of its
    logits.

    The logits are q.k + bias.

    Args:
      queries: the queries. Without the argument `scale`, the caller has already multiplied them by
        the factor of the logits.
      cached: keys and values of the W tokens before the segment, oldest first.
      keys, values: keys and values of the segment.
      bias: float32, the bias of each head and distance; column 0 is for the nearest key that a
        token sees. None stands for no bias.
      first: for each of N blocks, the place (index) of the first token of its document, a multiple
        of the number of tokens of a block. The segment begins at place 0, and cached tokens have
        negative places.
      dropout: dropout of the attention weights; None for no dropout.
      attend_to_self: True if the nearest key is the token itself, False if it is the token before.
      scale: if not None, the keys are first scaled to norm 1 and the queries of head h to norm
        scale[h].
      implementation: the name of an implementation; None selects the best one that supports the
        inputs.

    Returns:
      The attention output [B, T, H, K] in the dtype of `values`, with zeros where a token sees no
      key, and the float32 log-sum-exp [B, T, H] of the logits.

    Raises:
      NotImplementedError: the implementation does not exist or does not support the inputs.
    """

    def attend(q, cached, k, v, bias, first, dropout, scale) -> AttentionPart:
        """Returns the attention output and the log-sum-exp for the tokens of one device, from the
        device's parts of the arguments of `local_attention`.
        """
        part = dispatch.run(
            OP, implementation, q, cached, k, v, bias, first, dropout=dropout,
            attend_to_self=attend_to_self, scale=scale,
        )  # fmt: skip
        return AttentionPart(*part)

    inputs = queries, cached, keys, values, bias, first, dropout, scale
    # XLA cannot partition a kernel, so a kernel runs on each device's own arrays in a `shard_map`.
    # With dropout or with sharded blocks no kernel is used, and XLA partitions the whole program.
    if dropout is not None or rules.is_sharded("blocks"):
        return attend(*inputs)
    return on_each_device(attend, *inputs, sharded=False)
