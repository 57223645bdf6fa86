"""Bodies of the TPU kernels of causal clustered attention, for one head, batch row and block.

The module `pallas_tpu` describes the algorithm. All matrices are slots x rows. A row is a query of
the block, and a slot is one of three kinds: a key of the previous block, a key that a centroid
keeps, or a centroid's sum of the values that it does not keep.

In shapes, W is the number of tokens of a block, K the size of a head, C the number of centroids, R
the number of keys that each keeps, and M = C * R. In the class `_RowTile`, R is the number of rows
of the tile, S the number of visible slots of the previous block, and X = S + M + C.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float

from brt.ops.dispatch import to_bits
from brt.ops.softmax import FLOOR, MASKED
from brt.ops.tpu import LANES, NN, NT, TN, dot_float32

# The kernels process the queries (rows) of a block in tiles of at most this many rows.
ROWS = 128


class FarKernelSettings(NamedTuple):
    """Static settings of the kernels, which attend to the keys before the window (far keys)."""

    # True if a token's window ends with the token itself; False if the window ends with the token
    # before.
    attend_to_self: bool
    # R, the number of keys that a centroid keeps.
    slots: int
    interpret: bool | pltpu.InterpretParams


class FarKernelInputs(NamedTuple):
    """Inputs of a step of the grid, or their block specs."""

    # [W, K], queries of the block.
    q: Any
    # [W, K] each, keys and values of the previous block.
    k: Any
    v: Any
    # [M, K] each, keys and values of centroid 0, then of centroid 1 and so on.
    kept_k: Any
    kept_v: Any
    # float32 [C, K], each centroid's weighted sum of the values that it does not keep.
    rest: Any
    # [1, C], for each centroid, the log-sum-exp of its logits of the keys whose values are in this
    # sum.
    rest_lse: Any
    # [1, W], the centroid of every query.
    labels: Any
    # [W, K], gradient of the output. This field and those below are None in the forward pass.
    gradient: Any = None
    # [1, W], the log-sum-exp of each query's logits.
    lse: Any = None
    # [1, W], the sum over all slots of the softmax weight times the weight's gradient, minus the
    # gradient of `lse`. The gradient of a logit is the weight times the difference of the weight's
    # gradient and this number.
    weighted_gradient_sum: Any = None


class FarKernelGradients(NamedTuple):
    """Gradients of the first seven fields of `FarKernelInputs`, with the same shapes."""

    q: Any
    k: Any
    v: Any
    kept_k: Any
    kept_v: Any
    rest: Any
    rest_lse: Any


class _RowTile(NamedTuple):
    """A tile of R rows (queries) of a block, with masks: True for the slots that a row sees."""

    rows: slice
    # The mask of the first S keys of the previous block: keys that have left the row's window. The
    # other keys of the previous block are in the windows of all rows.
    outside_window: Bool[Array, "S R"]
    # The mask of the keys that centroids keep: keys of the row's centroid.
    kept: Bool[Array, "M R"]
    # The mask of the centroids' sums: the sum of the row's centroid.
    rest: Bool[Array, "C R"]

    @property
    def near(self) -> slice:
        """The slice of the first S keys of the previous block."""
        return slice(0, self.outside_window.shape[0])

    def masked(self, parts: tuple[Array, Array, Array]) -> Float[Array, "X R"]:
        """Concatenates the logits of the three kinds of slots, with `MASKED` for slots that a row
        does not see.
        """
        pairs = zip((self.outside_window, self.kept, self.rest), parts, strict=True)
        return jnp.concatenate([jnp.where(seen, x, MASKED) for seen, x in pairs], axis=0)

    def split(self, x: Float[Array, "X R"]) -> tuple[Array, Array, Array]:
        """Splits numbers of all slots, such as softmax weights, into the three kinds of slots."""
        near, kept = self.outside_window.shape[0], self.kept.shape[0]
        return x[:near], x[near : near + kept], x[near + kept :]


def _row_tiles(
    seen: Array, filled: Array, inputs: FarKernelInputs, settings: FarKernelSettings
) -> list[_RowTile]:
    window, size = inputs.q.shape[0], math.gcd(inputs.q.shape[0], ROWS)
    clusters, kept = inputs.rest.shape[0], inputs.kept_k.shape[0]
    tiles = []
    for begin in range(0, window, size):
        end = begin + size
        rows = begin + jax.lax.broadcasted_iota(jnp.int32, (end, size), 1)
        slots = jax.lax.broadcasted_iota(jnp.int32, (end, size), 0)
        outside_window = (slots <= rows if settings.attend_to_self else slots < rows) & seen
        labels = inputs.labels[:, begin:end]
        slots = jax.lax.broadcasted_iota(jnp.int32, (kept, size), 0)
        count = jnp.int32(settings.slots)
        there = jax.lax.rem(slots, count) < filled
        own = (jax.lax.div(slots, count) == labels) & there
        centroids = jax.lax.broadcasted_iota(jnp.int32, (clusters, size), 0)
        tiles.append(_RowTile(slice(begin, end), outside_window, own, centroids == labels))
    return tiles


def _rest_weight(inputs: FarKernelInputs) -> Float[Array, "C 1"]:
    row = inputs.rest_lse[...]
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T[:, :1]


def _logits(tile: _RowTile, inputs: FarKernelInputs) -> Float[Array, "X R"]:
    own = inputs.q[tile.rows]
    near, kept = inputs.k[tile.near], inputs.kept_k[...]
    summed = jnp.broadcast_to(_rest_weight(inputs), tile.rest.shape)
    return tile.masked((dot_float32(near, own, NT), dot_float32(kept, own, NT), summed))


def forward_kernel(
    cache_mask: Any,
    filled: Any,
    inputs: FarKernelInputs,
    y: Any,
    lse: Any,
    *,
    settings: FarKernelSettings,
) -> None:
    """Writes the attention output over the keys before the window, and the log-sum-exps.

    The output is written as unsigned integers with the same bits (`dispatch.to_bits`).

    Args:
      cache_mask: [B, N] for each batch row and block, not zero where the block may read the
        previous block.
      filled: [N, B], the number of keys that each centroid has kept so far, at most R.
      y, lse: references to the outputs, [W, K] and [1, W].
    """
    lane, n = pl.program_id(1), pl.program_id(2)
    dtype = inputs.v.dtype
    tiles = _row_tiles(cache_mask[lane, n] > 0, filled[n, lane], inputs, settings)
    softmax = []
    # The weights of all tiles are computed before any sum: the softmax of a tile can then be
    # computed while the matrix units compute the logits of the next tile.
    for tile in tiles:
        logits = _logits(tile, inputs)
        top = jnp.maximum(jnp.max(logits, axis=0, keepdims=True), FLOOR)
        weights = jnp.exp(logits - top)
        total = jnp.sum(weights, axis=0, keepdims=True) + jnp.exp(FLOOR - top)
        near, kept, rest = tile.split(weights)
        softmax.append((near.astype(dtype), kept.astype(dtype), rest, top, total))
    columns = inputs.v[...].T, inputs.kept_v[...].T
    summed = inputs.rest[...].T
    for tile, (near, kept, rest, top, total) in zip(tiles, softmax, strict=True):
        sums = dot_float32(columns[0][:, tile.near], near, NN)
        sums += dot_float32(columns[1], kept, NN) + dot_float32(summed, rest, NN)
        y[tile.rows] = to_bits((sums / total).T.astype(dtype))
        lse[:, tile.rows] = top + jnp.log(total)


def backward_kernel(
    cache_mask: Any,
    filled: Any,
    inputs: FarKernelInputs,
    results: FarKernelGradients,
    keys_sum: Any,
    values_sum: Any,
    *,
    settings: FarKernelSettings,
) -> None:
    """Writes the gradients of the inputs of one block to `results`.

    Args:
      cache_mask, filled: as for `forward_kernel`.
      keys_sum, values_sum: float32 scratch memory [W + M, K] for the gradients of keys and values:
        W of the previous block, then M of the keys that centroids keep.
    """
    lane, n = pl.program_id(1), pl.program_id(2)
    window, dtype = inputs.q.shape[0], inputs.q.dtype
    for total in (keys_sum, values_sum):
        total[:window] = jnp.zeros_like(total[:window])
    d_rest, d_rest_lse = jnp.zeros(results.rest.shape, jnp.float32), jnp.zeros((), jnp.float32)
    for tile in _row_tiles(cache_mask[lane, n] > 0, filled[n, lane], inputs, settings):
        own, theirs = inputs.q[tile.rows], inputs.gradient[tile.rows]
        weights = jnp.exp(_logits(tile, inputs) - inputs.lse[:, tile.rows])
        wide = theirs.astype(jnp.float32)
        read = inputs.v[tile.near], inputs.kept_v[...]
        d_weights = [dot_float32(values, theirs, NT) for values in read]
        d_weights.append(dot_float32(inputs.rest[...], wide, NT))
        d_logits = weights * (
            jnp.concatenate(d_weights, axis=0) - inputs.weighted_gradient_sum[:, tile.rows]
        )
        parts, (near, kept, rest) = tile.split(d_logits), tile.split(weights)
        d_near, d_kept = (x.astype(dtype) for x in parts[:2])
        d_own = dot_float32(d_near, inputs.k[tile.near], TN)
        d_own += dot_float32(d_kept, inputs.kept_k[...], TN)
        results.q[tile.rows] = d_own.astype(results.q.dtype)
        d_rest += dot_float32(rest, wide, NN)
        d_rest_lse += jnp.sum(parts[2], axis=1, keepdims=True)
        first = tile.rows.start == 0
        for total, cuts, rows in (
            (keys_sum, (d_near, d_kept), own),
            (values_sum, (near.astype(dtype), kept.astype(dtype)), theirs),
        ):
            total[tile.near] += dot_float32(cuts[0], rows, NN)
            kept_total = dot_float32(cuts[1], rows, NN)
            total[window:] = kept_total if first else total[window:] + kept_total
    for near, kept, total in (
        (results.k, results.kept_k, keys_sum), (results.v, results.kept_v, values_sum),
    ):  # fmt: skip
        near[...] = total[:window].astype(near.dtype)
        kept[...] = total[window:].astype(kept.dtype)
    results.rest[...] = d_rest
    results.rest_lse[...] = jnp.broadcast_to(d_rest_lse, (len(d_rest_lse), LANES)).T[:1]
