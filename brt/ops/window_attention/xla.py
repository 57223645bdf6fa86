"""Window attention in plain XLA, which folds the window of each query into W slots.

A query, also called a row, sees exactly W keys, in its own block of W tokens and in the block
before. Slot c of a row is key c of its own block if the row sees it, and otherwise key c of the
block before. The logits of a block are therefore one W x W matrix, which a triangular mask selects
from the products with both blocks. No entry lies outside the window, and the bias of every block is
the same circulant matrix. Of all W x W matrices, only the softmax is saved for the backward pass.

In shapes, Z is the number of tokens, or of blocks, of the cache and the segment together.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from brt.ops.reductions import sum_leading
from brt.ops.softmax import MASKED, softmax_and_lse


class _Settings(NamedTuple):
    attend_to_self: bool
    null_keys: bool
    biased: bool


def circulant(bias: Float[Array, "H W"], rows: int) -> Float[Array, "H R W"]:
    """Returns the array with entries [h, r, c] = bias[h, (r - c) mod W]."""
    heads, window = bias.shape
    # This needs no gather, and the gradient no scatter.
    # The vector of W numbers is repeated. If the repeated numbers are cut into rows of W + 1
    # entries, each row is shifted by one place from the row before.
    repeated = jnp.tile(jnp.roll(bias, -1, axis=1), (1, rows + 1))[:, : rows * (window + 1)]
    return jnp.flip(repeated.reshape(heads, rows, window + 1)[:, :, :window], axis=2)


def window_attention(
    queries: Float[Array, "B T H K"],
    keys: Float[Array, "B Z H K"],
    values: Float[Array, "B Z H K"],
    bias: Float[Array, "H W"] | None,
    cache_mask: Bool[Array, "B N"],
    dropout: Float[Array, "H W W"] | None,
    *,
    attend_to_self: bool,
    null_keys: bool,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B T H"]]:
    """Implements `api.window_part`; cached keys come first, and dropout has factors of weights."""
    heads, window = queries.shape[2], keys.shape[1] - queries.shape[1]

    def split_blocks(x: Float[Array, "B T H K"]) -> Float[Array, "B N H W K"]:
        batch, tokens, _, size = x.shape
        return x.reshape(batch, tokens // window, window, heads, size).transpose(0, 1, 3, 2, 4)

    tile = None
    if bias is not None:
        tile = circulant(bias if attend_to_self else jnp.roll(bias, 1, axis=1), window)
    y, lse = _attend(
        split_blocks(queries), split_blocks(keys), split_blocks(values), tile, cache_mask, dropout,
        _Settings(attend_to_self, null_keys, bias is not None),
    )  # fmt: skip
    y = y.transpose(0, 1, 3, 2, 4).reshape(queries.shape)
    return y, lse.swapaxes(2, 3).reshape(queries.shape[:-1])


def _own_block_mask(window: int, settings: _Settings) -> np.ndarray:
    """Returns bool [1, 1, 1, W, W], True where a row sees a key of its own block."""
    return np.tri(window, k=0 if settings.attend_to_self else -1, dtype=bool)[None, None, None]


def _mask_blocks(mask: Bool[Array, "B N"], x: Array, otherwise: float) -> Array:
    return jnp.where(mask[:, :, None, None, None], x, otherwise)


def _fold(
    before: Float[Array, "B N H W W"], own: Float[Array, "B N H W W"], settings: _Settings
) -> Float[Array, "B N H W W"]:
    return jnp.where(_own_block_mask(own.shape[-1], settings), own, before)


def _unfold(
    x: Float[Array, "B N H W W"], cache_mask: Bool[Array, "B N"], settings: _Settings
) -> list[Float[Array, "B N H W W"]]:
    """Splits x into the parts of the block before and of the own block; unseen keys get zeros."""
    own = _own_block_mask(x.shape[-1], settings)
    before = jnp.where(own, 0, x)
    # Without null keys, the softmax is already zero for hidden keys, so x needs no mask.
    if settings.null_keys:
        before = _mask_blocks(cache_mask, before, 0.0)
    return [before, jnp.where(own, x, 0)]


def _einsum(spec: str, a: Array, b: Array) -> Array:
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)


def _block_products(
    x: Float[Array, "B N H W K"], keys: Float[Array, "B Z H W K"]
) -> list[Float[Array, "B N H W W"]]:
    """Returns the products of each block with the block before and with itself."""
    return [_einsum("bnhqk,bnhsk->bnhqs", x, keys[:, j : j + x.shape[1]]) for j in range(2)]


@partial(jax.custom_vjp, nondiff_argnums=(6,))
def _attend(
    q: Float[Array, "B N H W K"],
    k: Float[Array, "B Z H W K"],
    v: Float[Array, "B Z H W K"],
    tile: Float[Array, "H W W"] | None,
    cache_mask: Bool[Array, "B N"],
    dropout: Float[Array, "H W W"] | None,
    settings: _Settings,
) -> tuple[Float[Array, "B N H W K"], Float[Array, "B N H W"]]:
    """Returns output and log-sum-exp of N blocks that attend to themselves and the block before."""
    return _forward(q, k, v, tile, cache_mask, dropout, settings)[0]


def _forward(
    q: Array,
    k: Array,
    v: Array,
    tile: Array | None,
    cache_mask: Array,
    dropout: Array | None,
    settings: _Settings,
) -> tuple[tuple[Array, Array], tuple]:
    before, own = _block_products(q, k)
    logits = _fold(
        _mask_blocks(cache_mask, before, 0.0 if settings.null_keys else MASKED), own, settings
    )
    weights, lse = softmax_and_lse(logits if tile is None else logits + tile[None, None])
    kept = weights if dropout is None else weights * dropout[None, None]
    y = _weighted_sum(_unfold(kept.astype(v.dtype), cache_mask, settings), v).astype(v.dtype)
    return (y, lse), (q, k, v, cache_mask, dropout, weights, y)


def _backward(settings: _Settings, residuals: tuple, gradients: tuple[Array, Array]) -> tuple:
    q, k, v, cache_mask, dropout, weights, y = residuals
    gradient, d_lse = gradients
    # The gradient of the softmax subtracts, for each query, the sum over W keys of the weight times
    # the weight's gradient. This sum equals the dot product of the output and the output's
    # gradient, which is a sum over K numbers only. The output `lse` depends on the logits, too,
    # with the weights as derivatives. The gradient of `lse` is therefore subtracted from the sum.
    along = jnp.sum(gradient.astype(jnp.float32) * y.astype(jnp.float32), axis=-1, keepdims=True)
    along -= d_lse[..., None]
    before, own = _block_products(gradient, v)
    if settings.null_keys:
        before = _mask_blocks(cache_mask, before, 0.0)
    d_weights, kept = _fold(before, own, settings), weights
    if dropout is not None:
        d_weights, kept = d_weights * dropout[None, None], weights * dropout[None, None]
    d_logits = weights * (d_weights - along)
    d_parts = _unfold(d_logits.astype(q.dtype), cache_mask, settings)
    kept_parts = _unfold(kept.astype(v.dtype), cache_mask, settings)
    d_k, d_v = (
        _add_overlapping([_einsum("bnhqs,bnhqk->bnhsk", part, x) for part in weighted])
        for weighted, x in ((d_parts, q), (kept_parts, gradient))
    )
    none = None if dropout is None else jnp.zeros_like(dropout)
    d_tile = sum_leading(d_logits, 2) if settings.biased else None
    d_q = _weighted_sum(d_parts, k).astype(q.dtype)
    return d_q, d_k.astype(k.dtype), d_v.astype(v.dtype), d_tile, None, none


def _weighted_sum(
    parts: list[Float[Array, "B N H W W"]], x: Float[Array, "B Z H W K"]
) -> Float[Array, "B N H W K"]:
    """Returns the sum of the rows of x in both blocks, weighted by `parts`."""
    count = parts[0].shape[1]
    before, own = (
        _einsum("bnhqs,bnhsk->bnhqk", part, x[:, j : j + count]) for j, part in enumerate(parts)
    )
    return before + own


def _add_overlapping(parts: list[Float[Array, "B N H W K"]]) -> Float[Array, "B Z H W K"]:
    """Adds the gradients that each block receives as the block before and as the own block."""
    before, own = (
        jnp.pad(part, ((0, 0), (j, 1 - j), (0, 0), (0, 0), (0, 0))) for j, part in enumerate(parts)
    )
    return before + own


_attend.defvjp(_forward, _backward)
