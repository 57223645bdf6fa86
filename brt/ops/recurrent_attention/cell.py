"""The weights of the recurrent cell, and the state keys and values that tokens read.

The cell has S state vectors. The tokens of a block attend to the states, and the states attend to
the tokens. Section 3.6 of Block-Recurrent Transformers describes three layouts: skip has attention
with a residual connection; dual also has an MLP with another residual connection; single has one
residual connection around both.

In shapes, B is the number of rows of the batch, S of states with D numbers, H of heads with K
numbers, W of tokens of a block, and F of hidden units of the MLP; *B stands for any leading axes,
and *M for the axes of the MLP's inputs.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from brt.ops.dense import dense
from brt.ops.gates import GateWeights
from brt.ops.normalization import l2_normalize, rms_norm


class CellWeights(NamedTuple):
    """Weights of the recurrent cell, with which the states are updated after each block.

    Attributes:
      norm: [D], scale of the norm before the projections.
      ids: [S, D], learned identity vectors, which are added to the normalised states so that the
        states differ (section 3.3).
      keys, values: [D, H, K], projections of the states to keys and values.
      queries: [D, H, K], projection of the states to the queries that attend to states.
      cross_queries: [D, H, K], projection of the states to the queries that attend to tokens.
      scale, cross_scale: [H], the factor of each head's queries, for `queries` and for
        `cross_queries`.
      output: [2, H, K, D], projection of both attention outputs; None in the single layout.
      output_gate: gate of the attention's residual connection; None in the single layout.
      mlp_norm: [D], scale of the norm before the MLP; None except in the dual layout.
      mlp_in: the first kernel of the MLP, [D, F] in the dual layout and [2, H, K, F] in the single
        layout; None in the skip layout, which has no MLP.
      mlp_out: [F, D], the second kernel of the MLP; None without an MLP.
      mlp_gate: gate of the MLP's residual connection; None without an MLP.
    """

    norm: Float[Array, " D"]
    ids: Float[Array, "S D"]
    keys: Float[Array, "D H K"]
    values: Float[Array, "D H K"]
    queries: Float[Array, "D H K"]
    cross_queries: Float[Array, "D H K"]
    scale: Float[Array, " H"]
    cross_scale: Float[Array, " H"]
    output: Float[Array, "2 H K D"] | None = None
    output_gate: GateWeights | None = None
    mlp_norm: Float[Array, " D"] | None = None
    mlp_in: Float[Array, "*M F"] | None = None
    mlp_out: Float[Array, "F D"] | None = None
    mlp_gate: GateWeights | None = None


class StateKV(NamedTuple):
    """Keys and values of the state vectors. Both the states and the tokens attend to them."""

    keys: Float[Array, "*B S H K"]
    values: Float[Array, "*B S H K"]


class TokenKV(NamedTuple):
    """Keys and values of the tokens of a block, with heads before tokens."""

    keys: Float[Array, "*B H W K"]
    values: Float[Array, "*B H W K"]


def tokens_by_head(keys: Float[Array, "*B W H K"], values: Float[Array, "*B W H K"]) -> TokenKV:
    """Returns the keys and values of tokens with the axis of heads before the axis of tokens."""
    return TokenKV(keys.swapaxes(-3, -2), values.swapaxes(-3, -2))


def state_kv(
    weights: CellWeights,
    vectors: Float[Array, "B S D"],
    *,
    normalize_qk: bool,
    dtype: Any = jnp.float32,
) -> StateKV:
    """Returns the keys and values of the states, in `dtype`, which the tokens of a block read.

    Args:
      weights: the cell's weights.
      vectors: float32, the states before the block.
      normalize_qk: True normalizes the keys.
      dtype: dtype of the products and of the result.
    """
    h = (rms_norm(vectors, weights.norm) + weights.ids[None]).astype(dtype)
    keys, values = (dense(h, kernel) for kernel in (weights.keys, weights.values))
    return StateKV(l2_normalize(keys) if normalize_qk else keys, values)
