"""Bodies of the TPU kernels of window attention, for one head, lane and block.

`pallas_tpu` describes the algorithm.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float

from brt.ops import dropout_bits
from brt.ops.dispatch import from_bits, to_bits
from brt.ops.softmax import FLOOR, MASKED
from brt.ops.tpu import (
    LANES,
    NN,
    NT,
    TN,
    dot_float32,
    l2_normalize_rows,
    l2_normalize_rows_backward,
)


class WindowKernelSettings(NamedTuple):
    """Static settings of the kernels.

    Attributes:
      attend_to_self: True if the nearest key of a token is the token's own.
      null_keys: True if unreadable keys count as zero keys with zero values.
      forward_rows, backward_rows: rows of a tile.
      interpret: runs on any device, slowly.
      scale: the factor of weights that dropout keeps.
    """

    attend_to_self: bool
    null_keys: bool
    forward_rows: int
    backward_rows: int
    interpret: bool | pltpu.InterpretParams
    scale: float = 1.0


class WindowBlocks(NamedTuple):
    """Keys or values [W, K] that a block sees; the cache is the block before the first one.

    Attributes:
      cached: those of the cache.
      before: those of the block before.
      own: those of the block.
    """

    cached: Any
    before: Any
    own: Any

    def loaded(self, first: Array) -> tuple[Array, Array]:
        """Returns the previous block, or the cache if `first` is True, and the current block."""
        return jax.lax.select(first, self.cached[...], self.before[...]), self.own[...]


class WindowKernelInputs(NamedTuple):
    """Inputs of a step of the grid, or their block specs; an input that is not needed is None.

    Attributes:
      q: [W, K], queries of the block.
      keys, values: those of the block before and of the block.
      scale: [1, 128], the length of the queries, if the kernel normalizes queries and keys.
      tile: [W, R], the bias of the slots of a block's first rows.
      dropout: the mask of kept weights, slots x rows, packed by `dropout_bits`.
      gradient: [W, K], gradient of the output, in the backward pass only, as all that follow.
      lse: [1, W], the bits of the log-sum-exp.
      along: [1, W], the sum of weights times their gradients, which the softmax's gradient
        subtracts.
    """

    q: Any
    keys: WindowBlocks
    values: WindowBlocks
    scale: Any = None
    tile: Any = None
    dropout: Any = None
    gradient: Any = None
    lse: Any = None
    along: Any = None


class WindowKernelGradients(NamedTuple):
    """Outputs of a step of the backward kernel; keys and values are those of the block before.

    Attributes:
      q: [W, K].
      keys, values: [W, K].
      cached_keys, cached_values: [W, K], gradients of the cache, written by a segment's first step.
      scale, tile: float32, summed over all steps of a head.
    """

    q: Any
    keys: Any
    values: Any
    cached_keys: Any
    cached_values: Any
    scale: Any
    tile: Any


class _LoadedBlocks(NamedTuple):
    """Keys, normalized if necessary, and values of both blocks."""

    keys: tuple[Array, Array]
    values: tuple[Array, Array]
    unseen: Array  # float32, MASKED if the block before is unreadable; added to its logits


def _load_blocks(
    n: Array, seen: Array, inputs: WindowKernelInputs, settings: WindowKernelSettings
) -> _LoadedBlocks:
    keys, values = (list(pair.loaded(n == 0)) for pair in (inputs.keys, inputs.values))
    if inputs.scale is not None:
        keys = [l2_normalize_rows(x)[0].astype(x.dtype) for x in keys]
    unseen = jnp.where(seen, 0.0, MASKED)
    if settings.null_keys:
        for pair in (keys, values):
            pair[0] = jax.lax.select(seen, pair[0], jnp.zeros_like(pair[0]))
        unseen = jnp.zeros(())
    return _LoadedBlocks((keys[0], keys[1]), (values[0], values[1]), unseen)


def _load_queries(inputs: WindowKernelInputs, rows: "_RowTile") -> Float[Array, "R K"]:
    own = inputs.q[rows.all]
    return (
        own
        if inputs.scale is None
        else (l2_normalize_rows(own)[0] * inputs.scale[:, :1]).astype(own.dtype)
    )


def _stack(parts: list[Array]) -> Array:
    """Concatenates the parts that are not empty along the first axis."""
    return jnp.concatenate([part for part in parts if len(part)], axis=0)


class _RowTile(NamedTuple):
    """Rows i * R to (i + 1) * R of a block of W rows."""

    i: int
    rows: int
    attend_to_self: bool

    @property
    def all(self) -> slice:
        """The rows of the tile."""
        return slice(self.i * self.rows, (self.i + 1) * self.rows)

    @property
    def current(self) -> slice:
        """The slots of the current block that any row of the tile sees."""
        return slice(0, (self.i + 1) * self.rows)

    @property
    def before(self) -> slice:
        """The slots of the block before that any row of the tile sees."""
        return slice(self.i * self.rows, None)

    def _own(self) -> Bool[Array, "R R"]:
        """Returns the mask of the tile's diagonal square, True where the slot is of the current
        block.
        """
        slot, row = (jax.lax.broadcasted_iota(jnp.int32, (self.rows, self.rows), a) for a in (0, 1))
        return slot <= row if self.attend_to_self else slot < row

    def folded(self, current: Array, before: Array) -> Float[Array, "W R"]:
        """Combines the numbers of both blocks to one number per slot, that of the slot's key."""
        begin, rows = self.i * self.rows, self.rows
        middle = jnp.where(self._own(), current[begin:], before[:rows])
        return _stack([current[:begin], middle, before[rows:]])

    def unfolded(self, x: Float[Array, "W R"], dtype: jnp.dtype) -> tuple[Array, Array]:
        """Splits the numbers of slots by block, with zeros where a slot holds the other block's
        key.
        """
        middle, own = x[self.all], self._own()
        current = _stack([x[: self.i * self.rows], jnp.where(own, middle, 0)])
        before = _stack([jnp.where(own, 0, middle), x[(self.i + 1) * self.rows :]])
        return current.astype(dtype), before.astype(dtype)

    def kept(self, words: Any) -> Bool[Array, "W R"]:
        """Returns the mask of weights that dropout keeps."""
        return dropout_bits.unpack(words[:, self.all], words.shape[1])

    def rolled(self, tile: Any) -> Float[Array, "W R"]:
        """Returns the bias of this tile's slots, the first rows' bias rolled by whole tiles."""
        if not self.i:
            return tile[...]
        cut = tile.shape[0] - self.i * self.rows
        return jnp.concatenate([tile[cut:], tile[:cut]], axis=0)

    def add_rolled(self, tile: Any, x: Float[Array, "W R"]) -> None:
        """Adds the gradient of this tile's bias to the gradient of the first rows' bias."""
        cut, begin = tile.shape[0] - self.i * self.rows, self.i * self.rows
        tile[:cut] += x[begin:]
        if self.i:
            tile[cut:] += x[:begin]

    def logits(
        self, block: _LoadedBlocks, own: Float[Array, "R K"], tile: Any
    ) -> Float[Array, "W R"]:
        """Returns the logits of the tile's rows and slots."""
        results = self.against(block.keys, own, block.unseen)
        return results if tile is None else results + self.rolled(tile)

    def against(
        self, pair: tuple[Array, Array], x: Float[Array, "R K"], unseen: Array | float = 0.0
    ) -> Float[Array, "W R"]:
        """Returns the folded products of the rows of x with the keys or values of both blocks."""
        before, current = pair
        return self.folded(
            dot_float32(current[self.current], x, NT),
            dot_float32(before[self.before], x, NT) + unseen,
        )

    def sums(
        self, columns: tuple[Array, Array], current: Array, before: Array
    ) -> Float[Array, "K R"]:
        """Returns the weighted sums of the columns [K, W] of both blocks."""
        current_sums = dot_float32(columns[1][:, self.current], current, NN)
        return current_sums + dot_float32(columns[0][:, self.before], before, NN)


def _row_tiles(window: int, rows: int, settings: WindowKernelSettings) -> list[_RowTile]:
    return [_RowTile(i, rows, settings.attend_to_self) for i in range(window // rows)]


def forward_kernel(
    cache_mask: Any,
    inputs: WindowKernelInputs,
    outputs: tuple[Any, Any],
    *,
    settings: WindowKernelSettings,
) -> None:
    """Computes the output and the log-sum-exp of a block, both as bits."""
    y, lse = outputs
    dtype = inputs.values.own.dtype
    lane, n = pl.program_id(1), pl.program_id(2)
    block = _load_blocks(n, cache_mask[lane, n] > 0, inputs, settings)
    transposed = block.values[0].T, block.values[1].T
    for rows in _row_tiles(y.shape[0], settings.forward_rows, settings):
        logits = rows.logits(block, _load_queries(inputs, rows), inputs.tile)
        top = jnp.maximum(jnp.max(logits, axis=0, keepdims=True), FLOOR)
        weights = jnp.exp(logits - top)
        total = jnp.sum(weights, axis=0, keepdims=True) + jnp.exp(FLOOR - top)
        if inputs.dropout is not None:
            weights = jnp.where(rows.kept(inputs.dropout), weights, 0.0)
        current, before = rows.unfolded(weights, dtype)
        sums = rows.sums(transposed, current, before)
        y[rows.all] = to_bits((sums * (settings.scale / total)).T.astype(dtype))
        lse[:, rows.all] = to_bits(top + jnp.log(total))


def backward_kernel(
    cache_mask: Any, inputs: WindowKernelInputs, results: WindowKernelGradients,
    keys_sum: Any, values_sum: Any, *,
    settings: WindowKernelSettings,
) -> None:  # fmt: skip
    """Computes the gradients of one step.

    The sums [2, W, K] are the gradients of keys and values of two consecutive blocks. The grid has
    one step more than there are blocks, which writes the gradients of the last block.
    """
    lane, n, blocks = pl.program_id(1), pl.program_id(2), pl.num_programs(2) - 1
    before, current = n % 2, (n + 1) % 2  # Indices of the sums of the two blocks.

    @pl.when(n == 0)
    def _() -> None:
        for total in (keys_sum, values_sum):
            total[0] = jnp.zeros_like(total[0])

    @pl.when((n == 0) & (lane == 0))
    def _() -> None:
        for total in (results.scale, results.tile):
            if total is not None:
                total[...] = jnp.zeros_like(total)

    @pl.when(n < blocks)
    def _() -> None:
        for total in (keys_sum, values_sum):
            total[current] = jnp.zeros_like(total[0])
        seen = cache_mask[lane, n] > 0
        block = _load_blocks(n, seen, inputs, settings)
        for rows in _row_tiles(results.q.shape[0], settings.backward_rows, settings):
            _add_gradients(
                rows,
                block,
                inputs,
                results,
                (keys_sum, values_sum),
                (before, current),
                seen,
                settings,
            )

    d_keys, d_values = keys_sum[before], values_sum[before] * settings.scale
    # In the step after the last block, the inputs are still those of the last block.
    if inputs.scale is not None:
        block_keys, last = inputs.keys.loaded(n == 0)
        d_keys = l2_normalize_rows_backward(jax.lax.select(n < blocks, block_keys, last), d_keys)[0]
    d_keys, d_values = d_keys.astype(results.keys.dtype), d_values.astype(results.values.dtype)
    results.keys[...], results.values[...] = d_keys, d_values

    @pl.when(n == 0)
    def _() -> None:
        results.cached_keys[...], results.cached_values[...] = d_keys, d_values


def _add_gradients(
    rows: _RowTile,
    block: _LoadedBlocks,
    inputs: WindowKernelInputs,
    results: WindowKernelGradients,
    sums: tuple[Any, Any],
    places: tuple[Array, Array],
    seen: Array,
    settings: WindowKernelSettings,
) -> None:
    """Adds the gradients of one tile of rows."""
    keys_sum, values_sum = sums
    before, current = places
    own, theirs = _load_queries(inputs, rows), inputs.gradient[rows.all]
    lse = from_bits(inputs.lse[:, rows.all], jnp.float32)
    weights = kept = jnp.exp(rows.logits(block, own, inputs.tile) - lse)
    d_weights = rows.against(block.values, theirs)
    if inputs.dropout is not None:
        stays = rows.kept(inputs.dropout)
        kept, d_weights = (jnp.where(stays, x, 0.0) for x in (kept, d_weights * settings.scale))
    d_logits = weights * (d_weights - inputs.along[:, rows.all])
    if results.tile is not None:
        rows.add_rolled(results.tile, d_logits)
    d_logit_parts, weight_parts = (rows.unfolded(x, own.dtype) for x in (d_logits, kept))
    keys_sum[current, rows.current] += dot_float32(d_logit_parts[0], own, NN)
    values_sum[current, rows.current] += dot_float32(weight_parts[0], theirs, NN)

    @pl.when(seen)
    def _() -> None:
        keys_sum[before, rows.before] += dot_float32(d_logit_parts[1], own, NN)
        values_sum[before, rows.before] += dot_float32(weight_parts[1], theirs, NN)

    d_own = dot_float32(d_logit_parts[0], block.keys[1][rows.current], TN)
    d_own += dot_float32(d_logit_parts[1], block.keys[0][rows.before], TN)
    if inputs.scale is not None:
        d_own, along = l2_normalize_rows_backward(inputs.q[rows.all], d_own)
        d_own *= inputs.scale[:, :1]
        results.scale[...] += jnp.broadcast_to(jnp.sum(along, axis=0, keepdims=True), (1, LANES))
    results.q[rows.all] = d_own.astype(results.q.dtype)
