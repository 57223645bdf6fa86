"""What the recurrent cell learns, and what it shows to the tokens."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from brt.ops.dense import dense
from brt.ops.gates import GateWeights
from brt.ops.normalization import l2_normalize, rms_norm


class CellWeights(NamedTuple):
    """Weights of the state update, by head; what reads both attentions has them on an axis.

    Attributes:
      norm: [D], scale of the norm before the projections.
      ids: [S, D], the states' learned identities (section 3.3).
      keys, values, queries, cross_queries: [D, H, K].
      scale, cross_scale: [H], for attention to states and to tokens.
      output: [2, H, K, D], or None in the single layout.
      output_gate: of the attention's residual, or None in the single layout.
      mlp_norm: [D], dual layout only.
      mlp_in: [D, F] (dual) or [2, H, K, F] (single); mlp_out: [F, D]; mlp_gate.
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
    """Keys and values of the state vectors, which states and tokens both attend to."""

    keys: Float[Array, "*B S H K"]
    values: Float[Array, "*B S H K"]


class Tokens(NamedTuple):
    """Keys and values of the tokens of a block, by head."""

    keys: Float[Array, "*B H W K"]
    values: Float[Array, "*B H W K"]


def tokens_by_head(keys: Float[Array, "*B W H K"], values: Float[Array, "*B W H K"]) -> Tokens:
    return Tokens(keys.swapaxes(-3, -2), values.swapaxes(-3, -2))


def state_memory(
    weights: CellWeights,
    vectors: Float[Array, "B S D"],
    *,
    normalize_qk: bool,
    dtype: Any = jnp.float32,
) -> StateKV:
    """The keys and values that the tokens of a block read; dtype as given."""
    h = (rms_norm(vectors, weights.norm) + weights.ids[None]).astype(dtype)
    keys, values = (dense(h, kernel) for kernel in (weights.keys, weights.values))
    return StateKV(l2_normalize(keys) if normalize_qk else keys, values)
