"""Softmax attention to the keys that a mask leaves."""

import numpy as np
from jaxtyping import Array, Bool, Float

from brt.ops import dispatch
from brt.ops.dispatch import Implementation, Op
from brt.ops.dropout import Dropout
from brt.ops.masked_attention import reference, xla

OP = Op(
    "masked_attention",
    (
        Implementation("xla", xla.attend),
        Implementation(
            "reference", reference.attend, auto=(), refusal=dispatch.dropout_refusal
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
    """Attention of every query to the keys it sees; logits are q.k + bias, unscaled.

    Args:
      bias: float32, shared by all leading axes.
      mask: True where a query sees a key; one that sees nothing gives zeros.
      dropout: of the weights.
      implementation: a named one runs or raises; None takes the best that can.

    Returns:
      In the dtype of `values`; softmax in float32.

    Raises:
      NotImplementedError: an implementation that does not exist, or not for these inputs.
    """
    return dispatch.run(
        OP, implementation, queries, keys, values, bias, mask, dropout=dropout
    )  # fmt: skip


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
    """`attend` to all valid keys; logits are scale * q.k.

    Args:
      valid: False on padding, which nothing sees.
      causal: a token sees no later one; T = X.
    """
    mask = valid_mask(valid, queries.shape[1], causal)
    return attend(queries * scale, keys, values, None, mask, dropout, implementation=implementation)


def valid_mask(valid: Bool[Array, "B X"], tokens: int, causal: bool) -> Bool[Array, "B #T X"]:
    """What the tokens see of valid keys; a causal token sees no later one."""
    if not causal:
        return valid[:, None]
    return valid[:, None] & np.tri(tokens, valid.shape[1], dtype=bool)[None]
