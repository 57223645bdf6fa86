"""Window attention in plain XLA: the window folds.

A token sees exactly W keys: those after the start of its window up to itself. A block of W rows
sees the W keys of the block before and its own. Of these two a row sees complementary parts, so
both fold into one, chosen by a triangle: the logits are W x W, the softmax does no idle work, and
the bias of every block is the same circulant matrix. The backward pass is written out: it keeps
the softmax only, and reads each array once.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from brt.ops.reductions import sum_leading
from brt.ops.softmax import MASKED, softmax_and_lse


class _Static(NamedTuple):
    """What is known when tracing."""

    attend_to_self: bool
    null_keys: bool
    biased: bool


def circulant(bias: Float[Array, "H W"], rows: int) -> Float[Array, "H R W"]:
    """Tile [h, r, c] = bias[h, (r - c) mod W] of the first rows; no gather, no scatter back."""
    heads, window = bias.shape
    # A vector repeated with period W and cut every W + 1 is shifted by one a row.
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
    """See `api.window_part`."""
    heads, window = queries.shape[2], keys.shape[1] - queries.shape[1]

    def blocked(x: Float[Array, "B T H K"]) -> Float[Array, "B N H W K"]:
        batch, tokens, _, size = x.shape
        return x.reshape(batch, tokens // window, window, heads, size).transpose(0, 1, 3, 2, 4)

    tile = None
    if bias is not None:
        tile = circulant(bias if attend_to_self else jnp.roll(bias, 1, axis=1), window)
    y, lse = _attend(
        blocked(queries), blocked(keys), blocked(values), tile, cache_mask, dropout,
        _Static(attend_to_self, null_keys, bias is not None),
    )  # fmt: skip
    y = y.transpose(0, 1, 3, 2, 4).reshape(queries.shape)
    return y, lse.swapaxes(2, 3).reshape(queries.shape[:-1])


def _own(window: int, static: _Static) -> np.ndarray:
    """Bool [1, 1, 1, W, W]: where a row sees its own block, not the one before."""
    return np.tri(window, k=0 if static.attend_to_self else -1, dtype=bool)[None, None, None]


def _by_block(mask: Bool[Array, "B N"], x: Array, otherwise: float) -> Array:
    return jnp.where(mask[:, :, None, None, None], x, otherwise)


def _folded(
    before: Float[Array, "B N H W W"], own: Float[Array, "B N H W W"], static: _Static
) -> Float[Array, "B N H W W"]:
    return jnp.where(_own(own.shape[-1], static), own, before)


def _unfolded(
    x: Float[Array, "B N H W W"], cache_mask: Bool[Array, "B N"], static: _Static
) -> list[Float[Array, "B N H W W"]]:
    """What goes to the block before and to the own one, zero where a row sees nothing."""
    own = _own(x.shape[-1], static)
    before = jnp.where(own, 0, x)
    if static.null_keys:  # else the softmax is zero there already
        before = _by_block(cache_mask, before, 0.0)
    return [before, jnp.where(own, x, 0)]


def _product(spec: str, a: Array, b: Array) -> Array:
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)


def _with_both(
    x: Float[Array, "B N H W K"], keys: Float[Array, "B Z H W K"]
) -> list[Float[Array, "B N H W W"]]:
    """Products of each block with the block before and with its own."""
    return [_product("bnhqk,bnhsk->bnhqs", x, keys[:, j : j + x.shape[1]]) for j in range(2)]


@partial(jax.custom_vjp, nondiff_argnums=(6,))
def _attend(
    q: Float[Array, "B N H W K"],
    k: Float[Array, "B Z H W K"],
    v: Float[Array, "B Z H W K"],
    tile: Float[Array, "H W W"] | None,
    cache_mask: Bool[Array, "B N"],
    dropout: Float[Array, "H W W"] | None,
    static: _Static,
) -> tuple[Float[Array, "B N H W K"], Float[Array, "B N H W"]]:
    """Attention of N blocks to themselves and those before, and its lse."""
    return _forward(q, k, v, tile, cache_mask, dropout, static)[0]


def _forward(
    q: Array,
    k: Array,
    v: Array,
    tile: Array | None,
    cache_mask: Array,
    dropout: Array | None,
    static: _Static,
) -> tuple[tuple[Array, Array], tuple]:
    before, own = _with_both(q, k)
    logits = _folded(
        _by_block(cache_mask, before, 0.0 if static.null_keys else MASKED), own, static
    )
    weights, lse = softmax_and_lse(logits if tile is None else logits + tile[None, None])
    kept = weights if dropout is None else weights * dropout[None, None]
    y = _weighted_sum(_unfolded(kept.astype(v.dtype), cache_mask, static), v).astype(v.dtype)
    return (y, lse), (q, k, v, cache_mask, dropout, weights, y)


def _backward(static: _Static, saved: tuple, gradients: tuple[Array, Array]) -> tuple:
    q, k, v, cache_mask, dropout, weights, y = saved
    gradient, d_lse = gradients
    # The softmax's own term, from the output: the same sum, over K numbers instead of W.
    along = jnp.sum(gradient.astype(jnp.float32) * y.astype(jnp.float32), axis=-1, keepdims=True)
    along -= d_lse[..., None]
    before, own = _with_both(gradient, v)
    if static.null_keys:
        before = _by_block(cache_mask, before, 0.0)
    d_weights, kept = _folded(before, own, static), weights
    if dropout is not None:
        d_weights, kept = d_weights * dropout[None, None], weights * dropout[None, None]
    d_logits = weights * (d_weights - along)
    d_parts = _unfolded(d_logits.astype(q.dtype), cache_mask, static)
    kept_parts = _unfolded(kept.astype(v.dtype), cache_mask, static)
    d_k, d_v = (
        _overlapped([_product("bnhqs,bnhqk->bnhsk", part, x) for part in weighted])
        for weighted, x in ((d_parts, q), (kept_parts, gradient))
    )
    none = None if dropout is None else jnp.zeros_like(dropout)
    d_tile = sum_leading(d_logits, 2) if static.biased else None
    d_q = _weighted_sum(d_parts, k).astype(q.dtype)
    return d_q, d_k.astype(k.dtype), d_v.astype(v.dtype), d_tile, None, none


def _weighted_sum(
    parts: list[Float[Array, "B N H W W"]], x: Float[Array, "B Z H W K"]
) -> Float[Array, "B N H W K"]:
    """Adds up what both blocks give: their rows of x, by their weights."""
    count = parts[0].shape[1]
    before, own = (
        _product("bnhqs,bnhsk->bnhqk", part, x[:, j : j + count]) for j, part in enumerate(parts)
    )
    return before + own


def _overlapped(parts: list[Float[Array, "B N H W K"]]) -> Float[Array, "B Z H W K"]:
    """Adds up what each block got: as the one before, and as the own."""
    before, own = (
        jnp.pad(part, ((0, 0), (j, 1 - j), (0, 0), (0, 0), (0, 0))) for j, part in enumerate(parts)
    )
    return before + own


_attend.defvjp(_forward, _backward)
