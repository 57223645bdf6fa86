"""Window attention in plain XLA: tiles of queries, each with a range of keys.

A tile has R consecutive queries (rows), and reads the S = W + R keys of consecutive tiles. A row
sees only W of these keys; for the other R keys, the bias of the tile is MASKED. The masked logits
are computed in vain, but every array is written by one matrix product and read by the next. Logits
have the layout [keys, rows], and the sums divide the output, for the reasons that
`softmax_attention.xla_cpu` gives.

XLA recomputes an array in each loop that reads it, if the computation seems cheap. For the bias
tile and for transposed keys and values, the computation is in fact expensive, so functions of
`layout` store these arrays.

In shapes, M is the number of tiles of a segment, and Z the number of tiles of the cache and the
segment together. N is the number of blocks of W tokens.
"""

from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from brt.ops.dropout import DropoutMask
from brt.ops.grouped_heads import by_head_of_group
from brt.ops.layout import row_major, transposed
from brt.ops.partial_attention import AttentionPart
from brt.ops.products import einsum
from brt.ops.reductions import sequential_sum
from brt.ops.softmax import FLOOR, MASKED
from brt.ops.window_attention.inputs import WindowInputs

# A tile has half as many rows as a window has tokens. A number above _MAX_ROWS is halved further,
# because larger tiles compute more masked logits. No number is halved below _MIN_ROWS, because
# smaller tiles are slower.
_MIN_ROWS, _MAX_ROWS = 32, 128


def tile_rows(window: int) -> int:
    """Returns R, the number of rows (queries) of a tile, which is a divisor of the window."""
    rows = window
    while rows % 2 == 0 and rows // 2 >= _MIN_ROWS and (rows == window or rows > _MAX_ROWS):
        rows //= 2
    return rows


def circulant(bias: Float[Array, "H W"], rows: int) -> Float[Array, "H R W"]:
    """Returns the array with entries [h, r, c] = bias[h, (r - c) mod W]."""
    heads, window = bias.shape
    # The following computation needs no gather, and its gradient needs no scatter.
    # The vector of W numbers is repeated. If the repeated numbers are cut into rows of W + 1
    # entries, each row is shifted by one place from the row before.
    repeated = jnp.tile(jnp.roll(bias, -1, axis=1), (1, rows + 1))[:, : rows * (window + 1)]
    return jnp.flip(repeated.reshape(heads, rows, window + 1)[:, :, :window], axis=2)


@by_head_of_group
def window_attention(inputs: WindowInputs, *, attend_to_self: bool) -> AttentionPart:
    """Implements `api.local_attention` for blocks of W tokens; dropout is a mask or None."""
    queries, keys, values = inputs.joined()
    window, heads = inputs.window, queries.shape[2]
    rows, blocks = tile_rows(window), queries.shape[1] // window
    starts = window * jnp.arange(blocks, dtype=jnp.int32)
    first = inputs.first
    readable = jnp.repeat(first, blocks // first.shape[1], axis=1) < starts[None]

    def split_tiles(x: Float[Array, "B T H K"], *axes: int) -> Float[Array, "B M H _ _"]:
        batch, tokens, heads, size = x.shape
        return x.reshape(batch, tokens // rows, rows, heads, size).transpose(0, 1, 3, *axes)

    q, k, v = (
        split_tiles(queries, 4, 2),
        row_major(split_tiles(keys, 2, 4)),
        row_major(split_tiles(values, 2, 4)),
    )
    bias = jnp.zeros((heads, window), jnp.float32) if inputs.bias is None else inputs.bias
    tile = _bias_tile(bias, rows, 0 if attend_to_self else 1)
    dropped = _dropout_tiles(inputs.dropout, blocks, rows)
    y, lse = _attend(q, k, v, tile, _key_mask(readable, window, rows), dropped)
    y = y.transpose(0, 1, 4, 2, 3).reshape(queries.shape)
    return AttentionPart(y, lse.swapaxes(2, 3).reshape(queries.shape[:-1]))


def _bias_tile(bias: Float[Array, "H W"], rows: int, nearest: int) -> Float[Array, "H S R"]:
    """Returns the bias of each of the S keys and R rows of a tile.

    This is the transpose of what `inputs.bias_band` returns for the tile. `nearest` is the distance
    from a query to the nearest key that it sees, 0 or 1.
    """
    # The padded bias has an entry for every distance between a row and a key of the tile.
    window, padding = bias.shape[1], (nearest, 2 * rows - nearest)
    by_distance = jnp.pad(bias, ((0, 0), padding), constant_values=MASKED)
    tile = circulant(jnp.roll(by_distance, -window, axis=1), rows)[:, :, : window + rows]
    return transposed(tile)


def _key_mask(cache_mask: Bool[Array, "B N"], window: int, rows: int) -> Bool[Array, "B M S"]:
    """Returns True where a tile may read a key, which is always so for keys of its own block."""
    place = np.arange(window // rows)
    # The first axis of `own_block` has the tiles of a block, and the second axis has the S keys
    # that a tile may see.
    own_block = place[:, None] * rows + np.arange(window + rows) >= window
    mask = cache_mask[:, :, None, None] | own_block[None, None]
    return mask.reshape(cache_mask.shape[0], -1, window + rows)


def _dropout_tiles(
    dropout: DropoutMask | None, blocks: int, rows: int
) -> Float[Array, "M H S R"] | None:
    """Returns factors for the S keys and R queries of each tile.

    The mask `dropout` has W slots for each query of a block. Slot c is for key c of the query's own
    block or of the block before, whichever the query sees (see `api.window_part`).
    """
    if dropout is None:
        return None
    factors = dropout.factors(jnp.dtype("float32"))
    starts = range(0, factors.shape[1], rows)
    rolled = [jnp.roll(factors[:, i : i + rows], -i, axis=2) for i in starts]
    tiles = [jnp.concatenate([x, x[:, :, :rows]], axis=2) for x in rolled]
    return jnp.tile(jnp.stack(tiles).swapaxes(2, 3), (blocks, 1, 1, 1))


def _matmul(a: Array, b: Array) -> Array:
    return einsum("...mk,...kn->...mn", a, b)


def _transposed(x: Array) -> Array:
    return row_major(x.swapaxes(-1, -2))


def _visible_keys(x: Float[Array, "B Z H R K"], tiles: int) -> Float[Array, "B M H S K"]:
    """Returns the keys or values that each tile may see."""
    return jnp.concatenate(_key_stretches(x, tiles), axis=3)


def _visible_keys_transposed(x: Float[Array, "B Z H R K"], tiles: int) -> Float[Array, "B M H K S"]:
    # The ranges are stacked, because a concatenation along the last axis would write each of them
    # twice.
    seen = jnp.stack(_key_stretches(_transposed(x), tiles), axis=4)
    return seen.reshape(*seen.shape[:4], -1)


def _key_stretches(x: Float[Array, "B Z H _ _"], tiles: int) -> list[Float[Array, "B M H _ _"]]:
    return [x[:, j : j + tiles] for j in range(x.shape[1] - tiles + 1)]


def _visible_keys_backward(
    gradient: Float[Array, "B M H S K"], rows: int
) -> Float[Array, "B Z H R K"]:
    """Computes the gradient of `_visible_keys`."""
    stretches = jnp.split(gradient, gradient.shape[3] // rows, axis=3)
    last = len(stretches) - 1
    # Range j of the keys that query tile m sees is key tile m + j.
    padded = (
        jnp.pad(part, ((0, 0), (j, last - j), (0, 0), (0, 0), (0, 0)))
        for j, part in enumerate(stretches)
    )
    return reduce(jnp.add, padded)


@jax.custom_vjp
def _attend(
    q: Float[Array, "B M H K R"],
    k: Float[Array, "B Z H R K"],
    v: Float[Array, "B Z H R K"],
    tile: Float[Array, "H S R"],
    mask: Bool[Array, "B M S"],
    dropout: Float[Array, "M H S R"] | None,
) -> tuple[Float[Array, "B M H K R"], Float[Array, "B M H R"]]:
    """Returns the output and the log-sum-exp of the R rows of each of M tiles."""
    return _forward(q, k, v, tile, mask, dropout)[0]


def _forward(
    q: Array,
    k: Array,
    v: Array,
    tile: Array,
    mask: Array,
    dropout: Array | None,
) -> tuple[tuple[Array, Array], tuple]:
    logits = (
        _matmul(_visible_keys(k, q.shape[1]), jax.lax.optimization_barrier(q)) + tile[None, None]
    )
    logits += jnp.where(mask, 0.0, MASKED)[:, :, None, :, None]
    # To take a single maximum over all keys, XLA would write the logits to memory and read them
    # again. The keys are therefore split into ranges of R keys. The elementwise maximum of all
    # ranges is taken first, and then the maximum within the resulting range.
    stretches = jnp.split(logits, logits.shape[-2] // q.shape[-1], axis=-2)
    highest = jnp.max(reduce(jnp.maximum, stretches), axis=-2, keepdims=True)
    top = jnp.maximum(highest, FLOOR)
    weights = jnp.exp(logits - top)
    kept = weights if dropout is None else weights * dropout[None]
    y = _matmul(_visible_keys_transposed(v, q.shape[1]), kept.astype(v.dtype))
    total = jnp.sum(weights, axis=-2, keepdims=True)
    total += jnp.exp(FLOOR - top)
    y = (y / total).astype(v.dtype)
    lse = (top + jnp.log(total))[..., 0, :]
    return (y, lse), (q, k, v, mask, dropout, weights, total, y)


def _backward(residuals: tuple, gradients: tuple[Array, Array]) -> tuple:
    q, k, v, mask, dropout, weights, total, y = residuals
    gradient, d_lse = gradients
    tiles, rows = q.shape[1], q.shape[4]
    # The output's gradient is divided by the sums of the weights. Dividing the weights would take
    # longer: a query has a weight for each key, but only K numbers of the output's gradient.
    scaled = jax.lax.optimization_barrier((gradient.astype(jnp.float32) / total).astype(q.dtype))
    # The gradient of the softmax subtracts, for each query, the sum over S keys of the weight times
    # the weight's gradient. This sum equals the dot product of the output and the output's
    # gradient, which is a sum over K numbers only. The output `lse` also depends on the logits, and
    # its derivatives are the weights. The gradient of `lse` is therefore subtracted from the sum.
    along = jnp.sum(scaled.astype(jnp.float32) * y.astype(jnp.float32), axis=-2, keepdims=True)
    along -= d_lse[..., None, :] / total
    d_weights = _matmul(_visible_keys(v, tiles), scaled)
    kept = weights
    if dropout is not None:
        d_weights, kept = d_weights * dropout[None], weights * dropout[None]
    d_logits = weights * (d_weights - along)
    narrow = d_logits.astype(q.dtype)
    d_q = _matmul(_visible_keys_transposed(k, tiles), narrow)
    d_k, d_v = (
        _visible_keys_backward(_matmul(by_key, _transposed(x)), rows)
        for by_key, x in ((narrow, q), (kept.astype(v.dtype), scaled))
    )
    none = None if dropout is None else jnp.zeros_like(dropout)
    d_tile = sequential_sum(d_logits, 2)
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), d_tile, None, none


_attend.defvjp(_forward, _backward)
