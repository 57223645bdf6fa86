"""Causal attention of every token to W keys of its document, up to itself or the token before it.

`brt.ops.window_attention` computes the same for blocks of exactly W tokens, which is faster. Here
the window and the length of a block are independent. Its kernels are used here, too: they process W
tokens at a time and mask the keys of other documents. In shapes, N is the number of blocks, and G
of heads of keys, each of which serves H / G consecutive heads of queries.
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
    """Returns the attention output of every token over its window.

    The logits are q.k + bias. The output is 0 where a token sees no key.

    Args:
      queries: already multiplied by any scale, unless `scale` is given.
      cached: keys and values of the W tokens before the segment, oldest first.
      bias: column 0 is for the nearest key that a token sees.
      first: for each block, the place of the first token of its document, a multiple of the length
        of a block. The segment begins at place 0, and cached tokens have negative places.
      attend_to_self: whether the nearest key is the token itself or the token before.
      scale: if given, the keys are first scaled to norm 1, and the queries of head h to norm
        scale[h].
    """

    def attend(q, cached, k, v, bias, first, dropout, scale) -> AttentionPart:
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
