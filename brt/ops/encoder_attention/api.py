"""Local attention: every token sees those within a radius to both sides (LongT5, 3.1.1).

Blocks are one longer than the radius, so that a token sees parts of three blocks and no
others. Letters beside the glossary's: W tokens of a block (the radius and one), X = 3 W.
"""

from jaxtyping import Array, Bool, Float

from brt.ops import dispatch
from brt.ops.dispatch import Implementation, Op
from brt.ops.dropout import Dropout
from brt.ops.encoder_attention import reference, xla
from brt.ops.encoder_attention.globals import Side

OP = Op(
    "encoder_attention",
    (
        Implementation("xla", xla.local_attention),
        Implementation(
            "reference", reference.local_attention, auto=(), refusal=dispatch.dropout_refusal
        ),
    ),
)


def local_attention(
    queries: Float[Array, "B T H K"],
    keys: Float[Array, "B T H K"],
    values: Float[Array, "B T H K"],
    bias: Float[Array, "H W X"] | None,
    mask: Bool[Array, "B T"],
    side: Side | None = None,
    dropout: Dropout | None = None,
    *,
    radius: int,
    implementation: str | None = None,
) -> Float[Array, "B T H K"]:
    """Attention to all keys at most `radius` away; logits are q.k + bias, unscaled.

    Args:
      bias: float32, of a block and the 3 W keys from the block before it on; None: none.
      mask: False on padding, which nothing sees.
      side: keys seen by all tokens, in the same softmax.
      dropout: applied to the weights.
      implementation: a named one runs or raises; None takes the best that can.

    Returns:
      In the dtype of `values`; softmax in float32. A token that sees no key gives zeros.

    Raises:
      NotImplementedError: an implementation that does not exist, or not for these inputs.
    """
    return dispatch.run(
        OP, implementation, queries, keys, values, bias, mask, side,
        dropout=dropout, radius=radius,
    )  # fmt: skip
