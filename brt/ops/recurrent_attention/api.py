"""The horizontal direction of the recurrent cell (Block-Recurrent Transformers, 3.2-3.6).

Only the state update is serial. A block's update needs the states and the tokens' keys
and values; the tokens' own side needs the states that were there before it. So a segment
takes two phases: `state_scan` runs over the blocks and emits what the tokens of each
block read, then the layer attends for the tokens of all blocks at once.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from brt.ops.gates import GateWeights, gate
from brt.ops.normalization import l2_normalize, rms_norm
from brt.ops.softmax import MASKED, safe_softmax


class CellWeights(NamedTuple):
    """Weights of the state update. A = H * K.

    Attributes:
      norm: [D], scale of the norm before the projections.
      ids: [S, D], the states' learned identities (section 3.3).
      keys, values, queries, cross_queries: [D, A].
      scale, cross_scale: [H], for attention to states and to tokens.
      output: [2A, D], or None in the single layout.
      output_gate: of the attention's residual, or None in the single layout.
      mlp_norm: [D], dual layout only.
      mlp_in: [D, F] (dual) or [2A, F] (single); mlp_out: [F, D]; mlp_gate.
    """

    norm: Float[Array, " D"]
    ids: Float[Array, "S D"]
    keys: Float[Array, "D A"]
    values: Float[Array, "D A"]
    queries: Float[Array, "D A"]
    cross_queries: Float[Array, "D A"]
    scale: Float[Array, " H"]
    cross_scale: Float[Array, " H"]
    output: Float[Array, "M D"] | None = None
    output_gate: GateWeights | None = None
    mlp_norm: Float[Array, " D"] | None = None
    mlp_in: Float[Array, "M F"] | None = None
    mlp_out: Float[Array, "F D"] | None = None
    mlp_gate: GateWeights | None = None


class StateMemory(NamedTuple):
    """Keys and values of the state vectors, which states and tokens both attend to."""

    keys: Float[Array, "*B S H K"]
    values: Float[Array, "*B S H K"]


def attend(
    queries: Float[Array, "*B Q H K"],
    keys: Float[Array, "*B S H K"],
    values: Float[Array, "*B S H K"],
) -> Float[Array, "*B Q H K"]:
    """Softmax attention without mask or bias; any scale is folded into the queries."""
    logits = jnp.einsum("...qhk,...shk->...hqs", queries, keys, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(logits, axis=-1).astype(values.dtype)
    return jnp.einsum("...hqs,...shk->...qhk", weights, values)


def _attend_two_blocks(
    queries: Float[Array, "B S H K"],
    keys: tuple[Float[Array, "B W H K"], Float[Array, "B W H K"]],
    values: tuple[Float[Array, "B W H K"], Float[Array, "B W H K"]],
    readable: Bool[Array, " B"],
    null_keys: bool,
) -> Float[Array, "B S H K"]:
    """States attend to the previous block, where it is readable, and to this one."""
    usable = readable[:, None, None, None]
    previous, own = (
        jnp.einsum("bshk,bwhk->bhsw", queries, k, preferred_element_type=jnp.float32) for k in keys
    )
    previous = jnp.where(usable, previous, 0.0 if null_keys else MASKED)
    v_previous = jnp.where(usable, values[0], 0) if null_keys else values[0]
    weights = safe_softmax(jnp.concatenate([previous, own], axis=-1)).astype(values[1].dtype)
    window = keys[0].shape[1]
    return jnp.einsum("bhsw,bwhk->bshk", weights[..., :window], v_previous) + jnp.einsum(
        "bhsw,bwhk->bshk", weights[..., window:], values[1]
    )


def _project(
    weights: CellWeights,
    vectors: Float[Array, "B S D"],
    kernels: tuple[Float[Array, "D A"], ...],
    dtype: jnp.dtype,
) -> tuple[Float[Array, "B S H K"], ...]:
    """Norm, state ids, and one product for all the kernels."""
    h = rms_norm(vectors, weights.norm) + weights.ids[None]
    kernel = jnp.concatenate(kernels, axis=1).astype(dtype)
    heads = weights.scale.shape[0]
    product = jnp.einsum("bsd,da->bsa", h.astype(dtype), kernel)
    parts = jnp.split(product, len(kernels), axis=-1)
    return tuple(part.reshape(*part.shape[:-1], heads, -1) for part in parts)


def state_memory(
    weights: CellWeights,
    vectors: Float[Array, "B S D"],
    *,
    normalize_qk: bool,
    dtype: jnp.dtype = jnp.float32,
) -> StateMemory:
    """The keys and values that the tokens of a block read; dtype as given."""
    keys, values = _project(weights, vectors, (weights.keys, weights.values), dtype)
    return StateMemory(l2_normalize(keys) if normalize_qk else keys, values)


def state_update(
    weights: CellWeights,
    vectors: Float[Array, "B S D"],
    keys: tuple[Float[Array, "B W H K"], Float[Array, "B W H K"]],
    values: tuple[Float[Array, "B W H K"], Float[Array, "B W H K"]],
    readable: Bool[Array, " B"],
    *,
    kind: str,
    tanh: str,
    normalize_qk: bool,
    null_keys: bool,
) -> tuple[Float[Array, "B S D"], StateMemory]:
    """One block: the states after it, and the memory of the states before it.

    Args:
      vectors: float32.
      keys, values: of the previous block and of this one.
      readable: whether the previous block may be read.
      kind: 'fixed', 'lstm' or 'gru'.
      tanh: 'original' (on the update of the single layout) or 'paper' (of lstm gates).
      null_keys: an unreadable block counts as zero keys with zero values.
    """
    dtype = keys[1].dtype
    k, v, q, q_cross = _project(
        weights, vectors, (weights.keys, weights.values, weights.queries, weights.cross_queries),
        dtype,
    )  # fmt: skip
    if normalize_qk:
        k, q, q_cross = l2_normalize(k), l2_normalize(q), l2_normalize(q_cross)
    q = q * weights.scale.astype(dtype)[None, None, :, None]
    q_cross = q_cross * weights.cross_scale.astype(dtype)[None, None, :, None]
    attended = jnp.concatenate(
        [attend(q, k, v), _attend_two_blocks(q_cross, keys, values, readable, null_keys)], axis=2
    )
    attended = attended.reshape(*attended.shape[:2], -1)
    return _gated(weights, vectors, attended, kind, tanh), StateMemory(k, v)


def _gated(
    weights: CellWeights,
    vectors: Float[Array, "B S D"],
    attended: Float[Array, "B S M"],
    kind: str,
    tanh: str,
) -> Float[Array, "B S D"]:
    """The dual, single or skip layout (section 3.6), told apart by the weights present."""

    def dense(x: Float[Array, "B S M"], kernel: Float[Array, "M D"]) -> Float[Array, "B S D"]:
        return jnp.einsum("bsm,md->bsd", x, kernel.astype(x.dtype))

    single = weights.output is None
    bounded = single if tanh == "original" else kind == "lstm"
    bound = jnp.tanh if bounded else lambda z: z
    if single:
        hidden = jax.nn.relu(dense(attended, weights.mlp_in))
        return gate(kind, weights.mlp_gate, vectors, bound(dense(hidden, weights.mlp_out)), hidden)
    vectors = gate(
        kind, weights.output_gate, vectors, bound(dense(attended, weights.output)), attended
    )
    if weights.mlp_in is None:
        return vectors
    normed = rms_norm(vectors, weights.mlp_norm).astype(attended.dtype)
    hidden = jax.nn.relu(dense(normed, weights.mlp_in))
    return gate(kind, weights.mlp_gate, vectors, bound(dense(hidden, weights.mlp_out)), hidden)


def state_scan(
    weights: CellWeights,
    initial: Float[Array, "S D"],
    vectors: Float[Array, "B S D"],
    keys: Float[Array, "B Z H K"],
    values: Float[Array, "B Z H K"],
    readable: Bool[Array, "B N"],
    document_start: Bool[Array, "B N"],
    *,
    kind: str,
    tanh: str = "original",
    normalize_qk: bool = True,
    null_keys: bool = False,
    unroll: int = 1,
) -> tuple[Float[Array, "B S D"], StateMemory]:
    """Runs the state update over the blocks of a segment.

    Args:
      initial: the learned states that a document starts from; float32.
      vectors: the states that the segment takes in; float32.
      keys, values: of the tokens: those of the cached block, then those of the segment.
      readable: whether block n may read the block before it.
      document_start: where the states begin anew.
      unroll: blocks per iteration of the scan.

    Returns:
      The states after the last block, and the memory that each block's tokens read,
      [B, N, S, H, K].
    """
    blocks = readable.shape[1]

    def blocked(x: Float[Array, "B Z H K"]) -> Float[Array, "_ B W H K"]:
        batch, _, heads, size = x.shape
        return jnp.moveaxis(x.reshape(batch, blocks + 1, -1, heads, size), 1, 0)

    k, v = blocked(keys), blocked(values)

    def body(
        s: Float[Array, "B S D"], block: tuple[Array, ...]
    ) -> tuple[Float[Array, "B S D"], StateMemory]:
        k_previous, k_own, v_previous, v_own, may_read, starts = block
        s = jnp.where(starts[:, None, None], initial[None], s)
        return state_update(
            weights, s, (k_previous, k_own), (v_previous, v_own), may_read,
            kind=kind, tanh=tanh, normalize_qk=normalize_qk, null_keys=null_keys,
        )  # fmt: skip

    xs = (k[:-1], k[1:], v[:-1], v[1:], readable.T, document_start.T)
    vectors, memory = jax.lax.scan(body, vectors, xs, unroll=min(unroll, blocks))
    return vectors, StateMemory(*(jnp.moveaxis(m, 0, 1) for m in memory))
