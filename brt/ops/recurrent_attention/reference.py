"""The recurrent cell block by block, with separate float32 products."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from brt.ops.attention import reference
from brt.ops.gates import gate
from brt.ops.normalization import l2_normalize, rms_norm
from brt.ops.recurrent_attention.cell import CellWeights, StateKV


def state_scan(
    weights: CellWeights,
    initial: Float[Array, "S D"],
    vectors: Float[Array, "B S D"],
    cached: tuple[Float[Array, "B W H K"], Float[Array, "B W H K"]],
    keys: Float[Array, "B T H K"],
    values: Float[Array, "B T H K"],
    cache_mask: Bool[Array, "B N"],
    document_start: Bool[Array, "B N"],
    *,
    kind: str,
    normalize_qk: bool,
    null_keys: bool,
    unroll: int = 1,
    attention: str | None = None,
) -> tuple[Float[Array, "B S D"], StateKV]:
    """Implements `api.state_scan`; with `normalize_qk`, the keys are already normalized."""
    blocks, dtype = cache_mask.shape[1], keys.dtype
    window = keys.shape[1] // blocks
    pairs = zip(cached, (keys, values), strict=True)
    keys, values = (jnp.concatenate(pair, axis=1) for pair in pairs)
    state_kvs = []
    for n in range(blocks):
        vectors = jnp.where(document_start[:, n, None, None], initial[None], vectors)
        h = rms_norm(vectors, weights.norm) + weights.ids[None]
        kernels = weights.keys, weights.queries, weights.cross_queries, weights.values
        k, q, to_tokens, v = (jnp.einsum("bsd,dhk->bshk", h, kernel) for kernel in kernels)
        if normalize_qk:
            k, q, to_tokens = (l2_normalize(x) for x in (k, q, to_tokens))
        q = q * weights.scale[None, None, :, None]
        to_tokens = to_tokens * weights.cross_scale[None, None, :, None]
        k_tokens, v_tokens = (
            x[:, n * window : (n + 2) * window].astype(jnp.float32) for x in (keys, values)
        )
        mask = cache_mask[:, n, None] | (np.arange(2 * window) >= window)[None]
        if null_keys:
            k_tokens, v_tokens = (
                jnp.where(mask[:, :, None, None], x, 0) for x in (k_tokens, v_tokens)
            )
            mask = jnp.ones_like(mask)
        everything = jnp.ones((len(k), 1, k.shape[1]), bool)
        parts = (
            reference.attend(q, k, v, None, everything),
            reference.attend(to_tokens, k_tokens, v_tokens, None, mask[:, None]),
        )
        attended = jnp.stack([part.output for part in parts], axis=2)
        vectors = _next_states(weights, vectors, attended, kind)
        state_kvs.append(StateKV(k.astype(dtype), v.astype(dtype)))
    return vectors, jax.tree.map(lambda *blocks: jnp.stack(blocks, axis=1), *state_kvs)


def _next_states(
    weights: CellWeights,
    vectors: Float[Array, "B S D"],
    attended: Float[Array, "B S 2 H K"],
    kind: str,
) -> Float[Array, "B S D"]:
    """Returns the states after the update.

    The layout skip has a gate after attention, single has a gate after the MLP, and dual has both.
    """
    single = weights.output is None
    inputs = attended
    if not single:
        update = jnp.tensordot(attended, weights.output, axes=3)
        vectors = gate(kind, weights.output_gate, vectors, update, attended)
        if weights.mlp_in is None:
            return vectors
        inputs = rms_norm(vectors, weights.mlp_norm)
    hidden = jax.nn.relu(jnp.tensordot(inputs, weights.mlp_in, axes=inputs.ndim - 2))
    update = jnp.matmul(hidden, weights.mlp_out)
    return gate(kind, weights.mlp_gate, vectors, jnp.tanh(update) if single else update, hidden)
