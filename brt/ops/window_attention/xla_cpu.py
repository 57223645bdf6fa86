"""Window attention as CPUs like it: tiles of rows, each beside one stretch of the keys it may see.

A tile of R rows sees W + R - 1 keys in a row, most rows of it W of them: what a row does not see is
part of the bias. That wastes R of W + R numbers of a softmax and copies each key W / R + 1 times,
but every array is written by one product and read by the next. Folding (`xla`) spares the idle
numbers and pays with passes over all of them, which take longer here.

Logits have keys down and rows along. So maxima and sums go down columns, many side by side, and all
six products are [M, K] by [K, N] as they lie; XLA's CPU backend takes up to twice as long for
others. What is transposed for that is as wide as a head. The backward pass keeps exp(logits - their
maximum), not the softmax: to divide what is as tall as a head takes less.

XLA works an array out anew in each loop that reads it, where that looks cheap to it. Two are not:
the tile of the bias, whose places take longer to find than exp, and keys and values turned, which
it turns once for each tile that sees them. `brt.ops.layout` has both written once.
"""

from functools import partial, reduce

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from brt.ops.layout import row_major, transposed
from brt.ops.reductions import sequential_sum
from brt.ops.softmax import FLOOR, MASKED
from brt.ops.window_attention.xla import circulant

# Smaller tiles run less well, larger ones idle more: half a window, within these.
_LEAST_ROWS, _MOST_ROWS = 32, 128


def tile_rows(window: int) -> int:
    """Rows of a tile: a divisor of the window."""
    rows = window
    while rows % 2 == 0 and rows // 2 >= _LEAST_ROWS and (rows == window or rows > _MOST_ROWS):
        rows //= 2
    return rows


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
    window = keys.shape[1] - queries.shape[1]
    rows = tile_rows(window)

    def tiled(x: Float[Array, "B T H K"], *axes: int) -> Float[Array, "B M H _ _"]:
        batch, tokens, heads, size = x.shape
        return x.reshape(batch, tokens // rows, rows, heads, size).transpose(0, 1, 3, *axes)

    if bias is None:
        bias = jnp.zeros((queries.shape[2], window), jnp.float32)
    q, k, v = tiled(queries, 4, 2), row_major(tiled(keys, 2, 4)), row_major(tiled(values, 2, 4))
    tile, mask = _bias_tile(bias, rows, attend_to_self), _mask(cache_mask, window, rows)
    dropped = _dropout_tiles(dropout, cache_mask.shape[1], rows)
    y, lse = _attend(q, k, v, tile, mask, dropped, null_keys)
    y = y.transpose(0, 1, 4, 2, 3).reshape(queries.shape)
    return y, lse.swapaxes(2, 3).reshape(queries.shape[:-1])


def _bias_tile(bias: Float[Array, "H W"], rows: int, attend_to_self: bool) -> Float[Array, "H S R"]:
    """Row r sees key s at distance r + W - s: its bias there, MASKED where that is no window's."""
    window = bias.shape[1]
    nearest = 0 if attend_to_self else 1
    others = (nearest, 2 * rows - nearest)  # as many distances as rows and keys have, less one
    by_distance = jnp.pad(bias, ((0, 0), others), constant_values=MASKED)
    tile = circulant(jnp.roll(by_distance, -window, axis=1), rows)[:, :, : window + rows]
    return transposed(tile)


def _mask(cache_mask: Bool[Array, "B N"], window: int, rows: int) -> Bool[Array, "B M S"]:
    """Whether a tile may read key s: it may, if that is of its own block."""
    place = np.arange(window // rows)
    own_block = place[:, None] * rows + np.arange(window + rows) >= window  # [tile of a block, S]
    mask = cache_mask[:, :, None, None] | own_block[None, None]
    return mask.reshape(cache_mask.shape[0], -1, window + rows)


def _dropout_tiles(
    dropout: Float[Array, "H W W"] | None, blocks: int, rows: int
) -> Float[Array, "M H S R"] | None:
    """Dropout of slot c of a block's keys, in the order of the keys of each tile."""
    if dropout is None:
        return None
    starts = range(0, dropout.shape[1], rows)
    rolled = [jnp.roll(dropout[:, i : i + rows], -i, axis=2) for i in starts]
    tiles = [jnp.concatenate([x, x[:, :, :rows]], axis=2) for x in rolled]
    return jnp.tile(jnp.stack(tiles).swapaxes(2, 3), (blocks, 1, 1, 1))


def _product(a: Array, b: Array) -> Array:
    return jnp.einsum("...mk,...kn->...mn", a, b, preferred_element_type=jnp.float32)


def _transposed(x: Array) -> Array:
    return row_major(x.swapaxes(-1, -2))


def _seen(
    x: Float[Array, "B Z H R K"], tiles: int, mask: Bool[Array, "B M S"] | None
) -> Float[Array, "B M H S K"]:
    """What each tile may see of keys or values; zeros beyond a mask."""
    seen = jnp.concatenate(_stretches(x, tiles), axis=3)
    return seen if mask is None else jnp.where(mask[:, :, None, :, None], seen, 0)


def _seen_across(
    x: Float[Array, "B Z H R K"], tiles: int, mask: Bool[Array, "B M S"] | None
) -> Float[Array, "B M H K S"]:
    """The same with keys along. Joined on the last axis each stretch would be written twice."""
    seen = jnp.stack(_stretches(_transposed(x), tiles), axis=4)
    seen = seen.reshape(*seen.shape[:4], -1)
    return seen if mask is None else jnp.where(mask[:, :, None, None], seen, 0)


def _stretches(x: Float[Array, "B Z H _ _"], tiles: int) -> list[Float[Array, "B M H _ _"]]:
    return [x[:, j : j + tiles] for j in range(x.shape[1] - tiles + 1)]


def _through_seen(
    gradient: Float[Array, "B M H S K"], tiles: int, mask: Bool[Array, "B M S"] | None, rows: int
) -> Float[Array, "B Z H R K"]:
    """The transpose of `_seen`: stretch j of a tile lies j tiles further on."""
    if mask is not None:
        gradient = jnp.where(mask[:, :, None, :, None], gradient, 0)
    stretches = jnp.split(gradient, gradient.shape[3] // rows, axis=3)
    last = len(stretches) - 1
    padded = (
        jnp.pad(part, ((0, 0), (j, last - j), (0, 0), (0, 0), (0, 0)))
        for j, part in enumerate(stretches)
    )
    return reduce(jnp.add, padded)


@partial(jax.custom_vjp, nondiff_argnums=(6,))
def _attend(
    q: Float[Array, "B M H K R"],
    k: Float[Array, "B Z H R K"],
    v: Float[Array, "B Z H R K"],
    tile: Float[Array, "H S R"],
    mask: Bool[Array, "B M S"],
    dropout: Float[Array, "M H S R"] | None,
    null_keys: bool,
) -> tuple[Float[Array, "B M H K R"], Float[Array, "B M H R"]]:
    """Attention of M tiles of R rows to the S keys that each may see, and its lse."""
    return _forward(q, k, v, tile, mask, dropout, null_keys)[0]


def _forward(
    q: Array,
    k: Array,
    v: Array,
    tile: Array,
    mask: Array,
    dropout: Array | None,
    null_keys: bool,
) -> tuple[tuple[Array, Array], tuple]:
    null_mask = mask if null_keys else None
    logits = (
        _product(_seen(k, q.shape[1], null_mask), jax.lax.optimization_barrier(q))
        + tile[None, None]
    )
    if not null_keys:
        logits += jnp.where(mask, 0.0, MASKED)[:, :, None, :, None]
    # Stretch by stretch first: so XLA does not write logits only for their maxima.
    stretches = jnp.split(logits, logits.shape[-2] // q.shape[-1], axis=-2)
    highest = jnp.max(reduce(jnp.maximum, stretches), axis=-2, keepdims=True)
    top = jnp.maximum(highest, FLOOR)
    weights = jnp.exp(logits - top)
    kept = weights if dropout is None else weights * dropout[None]
    y = _product(_seen_across(v, q.shape[1], null_mask), kept.astype(v.dtype))
    total = jnp.sum(weights, axis=-2, keepdims=True)
    total += jnp.exp(FLOOR - top)
    y = (y / total).astype(v.dtype)
    lse = (top + jnp.log(total))[..., 0, :]
    return (y, lse), (q, k, v, mask, dropout, weights, total, y)


def _backward(null_keys: bool, saved: tuple, gradients: tuple[Array, Array]) -> tuple:
    q, k, v, mask, dropout, weights, total, y = saved
    gradient, d_lse = gradients
    tiles, rows = q.shape[1], q.shape[4]
    null_mask = mask if null_keys else None
    # Divided by the sums here, where columns are as tall as a head.
    scaled = jax.lax.optimization_barrier((gradient.astype(jnp.float32) / total).astype(q.dtype))
    # The softmax's own term, from the output: the same sum, over K numbers instead of S.
    along = jnp.sum(scaled.astype(jnp.float32) * y.astype(jnp.float32), axis=-2, keepdims=True)
    along -= d_lse[..., None, :] / total
    d_weights = _product(_seen(v, tiles, null_mask), scaled)
    kept = weights
    if dropout is not None:
        d_weights, kept = d_weights * dropout[None], weights * dropout[None]
    d_logits = weights * (d_weights - along)
    narrow = d_logits.astype(q.dtype)
    d_q = _product(_seen_across(k, tiles, null_mask), narrow)
    d_k, d_v = (
        _through_seen(_product(by_key, _transposed(x)), tiles, null_mask, rows)
        for by_key, x in ((narrow, q), (kept.astype(v.dtype), scaled))
    )
    none = None if dropout is None else jnp.zeros_like(dropout)
    d_tile = sequential_sum(d_logits, 2)
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), d_tile, None, none


_attend.defvjp(_forward, _backward)
