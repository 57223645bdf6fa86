"""Local attention: every token sees the keys within a radius on both sides (LongT5, section 3.1.1).

A row's tokens are split into blocks of W tokens, one more than the radius. A token then sees only
keys of its own block, the previous block and the next block, which together have X = 3 W keys.
"""

from jaxtyping import Array, Bool, Float

from brt.ops import dispatch
from brt.ops.dispatch import Implementation, Op
from brt.ops.dropout import Dropout
from brt.ops.encoder_attention import reference, xla
from brt.ops.encoder_attention.globals import GlobalKeys, LocalInputs

OP = Op(
    "encoder_attention",
    (
        Implementation("xla", xla.local_attention),
        Implementation("reference", reference.local_attention, refusal=dispatch.dropout_refusal),
    ),
)


def local_attention(
    queries: Float[Array, "B T H K"],
    keys: Float[Array, "B T H K"],
    values: Float[Array, "B T H K"],
    bias: Float[Array, "H W X"] | None,
    mask: Bool[Array, "B T"],
    global_keys: GlobalKeys | None = None,
    dropout: Dropout | None = None,
    *,
    radius: int,
    implementation: str | None = None,
) -> Float[Array, "B T H K"]:
    """Returns the attention output of every token over all keys at most `radius` away.

    The logits are q.k + bias. A token that sees no key gets zeros.

    Args:
      bias: added to the logits of the W queries of a block and the X keys that these queries read.
      mask: False for padding, which no token sees.
      global_keys: additional keys that all tokens see, in the same softmax.
    """
    inputs = LocalInputs(queries, keys, values, bias, mask, global_keys)
    return dispatch.run(OP, implementation, inputs, dropout=dropout, radius=radius)
