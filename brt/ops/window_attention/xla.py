"""Window attention in plain XLA: the window folds, and on CPUs tiles are finer than blocks.

A token sees exactly W keys: those after the start of its window up to itself. A tile of w
rows sees W + w - 1 of them, in m + 1 stretches of w keys (m = W / w). Of the first and of
the last stretch a row sees complementary parts, so both fold into one, chosen by a
triangle: the logits are w x W, the softmax does no idle work, and the bias of every tile is
the same w rows of a circulant matrix. The backward pass is written out: it keeps the
softmax only, and reads each array once.
"""

from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from brt.ops.reductions import sum_leading
from brt.ops.softmax import MASKED, softmax_and_lse

# Products cost (m + 1) / m of the keys that count, but smaller tiles run less well on CPUs, and
# any do on TPUs: joining the stretches of a row costs them more than all products.
_CPU_TILE_ROWS = 128


class _Static(NamedTuple):
    """What is known when tracing."""

    attend_to_self: bool
    null_keys: bool
    tiles: int  # per block: m
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
    readable: Bool[Array, "B N"],
    dropout: Float[Array, "H W W"] | None,
    *,
    attend_to_self: bool,
    null_keys: bool,
    tile_rows: int = 0,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B T H"]]:
    """See `api.window_part`; tiles of `tile_rows`, or of the window if that is no multiple."""
    heads, window = queries.shape[2], keys.shape[1] - queries.shape[1]
    tiles = window // tile_rows if tile_rows and window % tile_rows == 0 else 1
    rows = window // tiles

    def tiled(x: Float[Array, "B T H K"]) -> Float[Array, "B M H R K"]:
        batch, tokens, _, size = x.shape
        return x.reshape(batch, tokens // rows, rows, heads, size).transpose(0, 1, 3, 2, 4)

    tile = None
    if bias is not None:
        tile = circulant(bias if attend_to_self else jnp.roll(bias, 1, axis=1), rows)
    y, lse = _attend(
        tiled(queries), tiled(keys), tiled(values), tile,
        _stretch_mask(readable, tiles), _dropout_tiles(dropout, readable.shape[1], tiles),
        _Static(attend_to_self, null_keys, tiles, bias is not None),
    )  # fmt: skip
    y = y.transpose(0, 1, 3, 2, 4).reshape(queries.shape)
    return y, lse.swapaxes(2, 3).reshape(queries.shape[:-1])


in_fine_tiles = partial(window_attention, tile_rows=_CPU_TILE_ROWS)


def _stretch_mask(readable: Bool[Array, "B N"], tiles: int) -> Bool[Array, "B M J"]:
    """Whether a tile may read stretch j < m: it may, if that is of its own block."""
    place = np.arange(tiles)
    own_block = (place[:, None] + place[None, :]) >= tiles  # [tile of the block, stretch]
    mask = readable[:, :, None, None] | own_block[None, None]
    return mask.reshape(readable.shape[0], -1, tiles)


def _dropout_tiles(
    dropout: Float[Array, "H W W"] | None, blocks: int, tiles: int
) -> Float[Array, "M H R W"] | None:
    """Dropout of slot c, in the order of the stretches of each tile."""
    if dropout is None:
        return None
    heads, window, _ = dropout.shape
    rows = window // tiles
    cut = dropout.reshape(heads, tiles, rows, tiles, rows)
    ordered = [jnp.roll(cut[:, i], -i, axis=2).reshape(heads, rows, window) for i in range(tiles)]
    return jnp.tile(jnp.stack(ordered), (blocks, 1, 1, 1))


def _triangle(rows: int, static: _Static) -> np.ndarray:
    """Bool [1, 1, 1, R, R]: where a row sees the last stretch (its own tile), not the first."""
    return np.tri(rows, k=0 if static.attend_to_self else -1, dtype=bool)[None, None, None]


def _unfolded(
    x: Float[Array, "B M H R W"], mask: Bool[Array, "B M J"], static: _Static
) -> list[Float[Array, "B M H R R"]]:
    """The m + 1 stretches of folded weights, zero where a row sees nothing."""
    first, *middle = jnp.split(x, static.tiles, axis=-1)
    own = _triangle(first.shape[-1], static)
    stretches = [jnp.where(own, 0, first), *middle]
    if static.null_keys:  # else the softmax is zero there already
        stretches = [
            jnp.where(mask[:, :, j, None, None, None], part, 0) for j, part in enumerate(stretches)
        ]
    return [*stretches, jnp.where(own, first, 0)]


def _product(spec: str, a: Array, b: Array) -> Array:
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)


def _logits(
    q: Float[Array, "B M H R K"],
    k: Float[Array, "B Z H R K"],
    mask: Bool[Array, "B M J"],
    static: _Static,
) -> Float[Array, "B M H R W"]:
    """The folded logits, without the bias."""
    count = q.shape[1]
    parts = [
        _product("bnhqk,bnhsk->bnhqs", q, k[:, j : j + count]) for j in range(static.tiles + 1)
    ]
    unseen = 0.0 if static.null_keys else MASKED
    parts[:-1] = [
        jnp.where(mask[:, :, j, None, None, None], part, unseen)
        for j, part in enumerate(parts[:-1])
    ]
    parts[0] = jnp.where(_triangle(q.shape[3], static), parts.pop(), parts[0])
    return jnp.concatenate(parts, axis=-1)


@partial(jax.custom_vjp, nondiff_argnums=(6,))
def _attend(
    q: Float[Array, "B M H R K"],
    k: Float[Array, "B Z H R K"],
    v: Float[Array, "B Z H R K"],
    tile: Float[Array, "H R W"] | None,
    mask: Bool[Array, "B M J"],
    dropout: Float[Array, "M H R W"] | None,
    static: _Static,
) -> tuple[Float[Array, "B M H R K"], Float[Array, "B M H R"]]:
    """Attention of M tiles of R rows to their stretches of keys, and its lse."""
    return _forward(q, k, v, tile, mask, dropout, static)[0]


def _forward(
    q: Array,
    k: Array,
    v: Array,
    tile: Array | None,
    mask: Array,
    dropout: Array | None,
    static: _Static,
) -> tuple[tuple[Array, Array], tuple]:
    logits = _logits(q, k, mask, static)
    weights, lse = softmax_and_lse(logits if tile is None else logits + tile[None, None])
    kept = weights if dropout is None else weights * dropout[None]
    count = q.shape[1]
    parts = _unfolded(kept.astype(v.dtype), mask, static)
    y = _weighted_sum(parts, v, count).astype(v.dtype)
    return (y, lse), (q, k, v, mask, dropout, weights, y)


def _backward(static: _Static, saved: tuple, gradients: tuple[Array, Array]) -> tuple:
    q, k, v, mask, dropout, weights, y = saved
    gradient, d_lse = gradients
    count = q.shape[1]
    # The softmax's own term, from the output: the same sum, over K numbers instead of W.
    along = jnp.sum(gradient.astype(jnp.float32) * y.astype(jnp.float32), axis=-1, keepdims=True)
    along -= d_lse[..., None]
    parts = [
        _product("bnhqk,bnhsk->bnhqs", gradient, v[:, j : j + count])
        for j in range(static.tiles + 1)
    ]
    if static.null_keys:
        parts[:-1] = [
            jnp.where(mask[:, :, j, None, None, None], part, 0) for j, part in enumerate(parts[:-1])
        ]
    parts[0] = jnp.where(_triangle(q.shape[3], static), parts.pop(), parts[0])
    d_weights = jnp.concatenate(parts, axis=-1)
    kept = weights
    if dropout is not None:
        d_weights, kept = d_weights * dropout[None], weights * dropout[None]
    d_logits = weights * (d_weights - along)
    d_parts = _unfolded(d_logits.astype(q.dtype), mask, static)
    kept_parts = _unfolded(kept.astype(v.dtype), mask, static)
    d_q = _weighted_sum(d_parts, k, count)
    d_k, d_v = (
        _overlapped([_product("bnhqs,bnhqk->bnhsk", part, x) for part in weighted])
        for weighted, x in ((d_parts, q), (kept_parts, gradient))
    )
    none = None if dropout is None else jnp.zeros_like(dropout)
    d_tile = sum_leading(d_logits, 2) if static.biased else None
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), d_tile, None, none


def _weighted_sum(
    parts: list[Float[Array, "B M H R R"]], x: Float[Array, "B Z H R K"], count: int
) -> Float[Array, "B M H R K"]:
    """Adds up what each stretch gives to `count` tiles: its rows of x, by their weights."""
    products = (
        _product("bnhqs,bnhsk->bnhqk", part, x[:, j : j + count]) for j, part in enumerate(parts)
    )
    return reduce(jnp.add, products)


def _overlapped(stretches: list[Float[Array, "B M H R K"]]) -> Float[Array, "B Z H R K"]:
    """Adds up what each stretch got: stretch j of a tile lies j tiles further on."""
    last = len(stretches) - 1
    padded = (
        jnp.pad(part, ((0, 0), (j, last - j), (0, 0), (0, 0), (0, 0)))
        for j, part in enumerate(stretches)
    )
    return reduce(jnp.add, padded)


_attend.defvjp(_forward, _backward)
