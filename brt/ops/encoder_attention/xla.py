"""Local attention in plain XLA: each of N blocks attends to itself and both neighbours (a window).

In shapes, Y is the number of keys of a window plus the number of global tokens. See `api` for the
others.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from brt.ops.dropout import Dropout
from brt.ops.encoder_attention.globals import GlobalKeys, LocalInputs
from brt.ops.reductions import add_shared
from brt.ops.softmax import masked_softmax


def local_attention(
    inputs: LocalInputs, *, dropout: Dropout | None, radius: int
) -> Float[Array, "B T H K"]:
    queries, keys, values, bias, mask, global_keys = inputs
    block, tokens = radius + 1, queries.shape[1]
    q, near_k, near_v = _blocks(queries, block), _windows(keys, block), _windows(values, block)
    logits = jnp.einsum("bnqhk,bnshk->bnhqs", q, near_k, preferred_element_type=jnp.float32)
    if bias is not None:
        logits = add_shared(logits, bias)
    # The mask `near` is True where |key - query| <= radius. Column 0 of the mask belongs to the
    # first key of the block before the query's block.
    offsets = np.arange(3 * block)[None, :] - block - np.arange(block)[:, None]
    near = np.abs(offsets) <= radius
    seen = _windows(mask, block)[:, :, None, None, :] & near[None, None, None]
    if global_keys is not None:
        logits, seen = _append_global_keys(logits, seen, q, global_keys)
    weights = masked_softmax(logits, seen).astype(values.dtype)
    if dropout is not None:
        weights = dropout(weights)
    y = jnp.einsum("bnhqs,bnshk->bnqhk", weights[..., : 3 * block], near_v)
    if global_keys is not None:
        y += jnp.einsum("bnhqg,bghk->bnqhk", weights[..., 3 * block :], global_keys.values)
    return y.reshape(y.shape[0], -1, *y.shape[3:])[:, :tokens]


def _append_global_keys(
    logits: Float[Array, "B N H W X"],
    seen: Bool[Array, "B N 1 W X"],
    q: Float[Array, "B N W H K"],
    global_keys: GlobalKeys,
) -> tuple[Float[Array, "B N H W Y"], Bool[Array, "B N 1 W Y"]]:
    """Appends the columns of the global tokens to the logits and to the mask `seen`."""
    batch, count, block = q.shape[:3]
    more = jnp.einsum("bnqhk,bghk->bnhqg", q, global_keys.keys, preferred_element_type=jnp.float32)
    if global_keys.bias is not None:
        more += _blocks(global_keys.bias.transpose(0, 2, 1, 3), block).transpose(0, 1, 3, 2, 4)
    shape = (batch, count, 1, block, global_keys.exist.shape[1])
    exist = jnp.broadcast_to(global_keys.exist[:, None, None, None], shape)
    return jnp.concatenate([logits, more], axis=-1), jnp.concatenate([seen, exist], axis=-1)


def _blocks(x: Array, block: int) -> Array:
    """Splits [B, T, ...] into blocks [B, N, W, ...], padded with zeros."""
    count = -(-x.shape[1] // block)
    x = jnp.pad(x, ((0, 0), (0, count * block - x.shape[1])) + ((0, 0),) * (x.ndim - 2))
    return x.reshape(x.shape[0], count, block, *x.shape[2:])


def _windows(x: Array, block: int) -> Array:
    """Returns each block of x [B, T, ...] joined with its two neighbours, [B, N, 3 W, ...]."""
    cut = _blocks(x, block)
    count = cut.shape[1]
    padded = jnp.pad(cut, ((0, 0), (1, 1)) + ((0, 0),) * (cut.ndim - 2))
    return jnp.concatenate([padded[:, i : i + count] for i in range(3)], axis=2)
