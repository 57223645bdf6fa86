"""Window attention in plain XLA: the window folds into one W x W softmax per block.

A token sees exactly W keys, so slot c of its row holds the key c of its own block where
that is not in its future, else the key c of the previous block. That halves the softmax
and makes the bias one circulant W x W tile, shared by all blocks.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from brt.ops.softmax import MASKED, safe_softmax


def circulant(bias: Float[Array, "H W"]) -> Float[Array, "H W W"]:
    """Tile [h, r, c] = bias[h, (r - c) mod W], without a gather (nor a scatter back)."""
    heads, window = bias.shape
    # Row r of a vector repeated with period W and cut every W + 1 is shifted by r.
    rows = jnp.tile(jnp.roll(bias, -1, axis=1), (1, window + 1))
    shifted = rows.reshape(heads, window, window + 1)[:, :, :window]
    return jnp.flip(shifted, axis=2)


def own_slots(window: int, attend_to_self: bool) -> np.ndarray:
    """Bool [W, W]: True where slot c of row r holds a key of the query's own block."""
    return np.tri(window, k=0 if attend_to_self else -1, dtype=bool)


def folded_bias(bias: Float[Array, "H W"], attend_to_self: bool) -> Float[Array, "H W W"]:
    """The bias of every slot. Slot c is (r - c) mod W back, or that of r - c - 1, plus 1."""
    return circulant(bias if attend_to_self else jnp.roll(bias, 1, axis=1))


def window_attention(
    queries: Float[Array, "B T H K"],
    keys: Float[Array, "B Z H K"],
    values: Float[Array, "B Z H K"],
    bias: Float[Array, "H W"],
    readable: Bool[Array, "B N"],
    dropout: Float[Array, "H W W"] | None,
    *,
    attend_to_self: bool,
    null_keys: bool,
) -> Float[Array, "B T H K"]:
    """See `api.window_attention`."""
    batch, tokens, heads, size = queries.shape
    window, blocks = bias.shape[1], readable.shape[1]

    def blocked(x: Float[Array, "B T H K"]) -> Float[Array, "B N W H K"]:
        return x.reshape(batch, blocks, window, heads, size)

    q = blocked(queries)
    k, k_previous = blocked(keys[:, window:]), blocked(keys[:, :tokens])
    v, v_previous = blocked(values[:, window:]), blocked(values[:, :tokens])
    own = own_slots(window, attend_to_self)[None, None, None]
    usable = readable[:, :, None, None, None]

    logits_own = jnp.einsum("bnqhk,bnshk->bnhqs", q, k, preferred_element_type=jnp.float32)
    logits_previous = jnp.einsum(
        "bnqhk,bnshk->bnhqs", q, k_previous, preferred_element_type=jnp.float32
    )
    tile = folded_bias(bias, attend_to_self)[None, None]
    if null_keys:
        v_previous = jnp.where(usable, v_previous, 0)
        past = jnp.where(usable, logits_previous, 0.0) + tile
    else:
        past = jnp.where(usable, logits_previous + tile, MASKED)
    weights = safe_softmax(jnp.where(own, logits_own + tile, past))
    if dropout is not None:
        weights = weights * dropout[None, None]
    weights = weights.astype(v.dtype)
    y = jnp.einsum("bnhqs,bnshk->bnqhk", jnp.where(own, weights, 0), v)
    y += jnp.einsum("bnhqs,bnshk->bnqhk", jnp.where(own, 0, weights), v_previous)
    return y.reshape(batch, tokens, heads, size)
