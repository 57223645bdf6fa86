"""The weights of the recurrent cell, and the state keys and values that tokens read.

Section 3.6 of Block-Recurrent Transformers describes three layouts: skip has attention with a
residual connection; dual also has an MLP with another residual connection; single has one residual
connection around attention and MLP.

In shapes, there are S states of D numbers, blocks of W tokens, H heads of size K, and F hidden
units of the MLP. *M stands for the axes of the MLP's inputs, and *B for any leading axes.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from brt.ops.dense import dense
from brt.ops.gates import GateWeights
from brt.ops.normalization import l2_normalize, rms_norm


class CellWeights(NamedTuple):
    """Weights of the recurrent cell, with which the states are updated after each block."""

    norm: Float[Array, " D"]  # the scale of the norm before the projections
    # Learned identity vectors, which are added to the normalised states so that they differ
    # (section 3.3).
    ids: Float[Array, "S D"]
    keys: Float[Array, "D H K"]
    values: Float[Array, "D H K"]
    queries: Float[Array, "D H K"]  # the projection to queries that attend to states
    cross_queries: Float[Array, "D H K"]  # the projection to queries that attend to tokens
    scale: Float[Array, " H"]  # the factor of each head's `queries`
    cross_scale: Float[Array, " H"]  # the factor of each head's `cross_queries`
    # The projection of both attention outputs; None in the single layout.
    output: Float[Array, "2 H K D"] | None = None
    # The gate of the attention's residual connection; None in the single layout.
    output_gate: GateWeights | None = None
    # the scale of the norm before the MLP; None unless the layout is dual
    mlp_norm: Float[Array, " D"] | None = None
    # The MLP's first weights, [D, F] (dual) or [2, H, K, F] (single); None without an MLP.
    mlp_in: Float[Array, "*M F"] | None = None
    mlp_out: Float[Array, "F D"] | None = None
    mlp_gate: GateWeights | None = None  # the gate of the MLP's residual connection


class StateKV(NamedTuple):
    """Keys and values of the state vectors. Both the states and the tokens attend to them."""

    keys: Float[Array, "*B S H K"]
    values: Float[Array, "*B S H K"]


class TokenKV(NamedTuple):
    """Keys and values of the tokens of a block, with heads before tokens."""

    keys: Float[Array, "*B H W K"]
    values: Float[Array, "*B H W K"]


def tokens_by_head(keys: Float[Array, "*B W H K"], values: Float[Array, "*B W H K"]) -> TokenKV:
    return TokenKV(keys.swapaxes(-3, -2), values.swapaxes(-3, -2))


def state_kv(
    weights: CellWeights,
    vectors: Float[Array, "B S D"],
    *,
    normalize_qk: bool,
    dtype: Any = jnp.float32,
) -> StateKV:
    """Returns the keys and values of the states before a block, which the block's tokens read."""
    h = (rms_norm(vectors, weights.norm) + weights.ids[None]).astype(dtype)
    keys, values = (dense(h, kernel) for kernel in (weights.keys, weights.values))
    return StateKV(l2_normalize(keys) if normalize_qk else keys, values)
