"""Bodies of the TPU kernels of window attention, for one head, lane and block.

The module `pallas_tpu` describes the algorithm. A lane is a row of the batch. In shapes, W is the
number of tokens of a block and of a window, and R the number of rows (queries) of a tile. Slot c of
a row is key c of the row's own block if the row sees it, and otherwise key c of the previous block.
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
      forward_rows, backward_rows: the number of rows of a tile, in the forward and the backward
        kernel.
      interpret: True runs the kernels on any device, slowly.
      scale: the factor of weights that dropout keeps.
    """

    attend_to_self: bool
    null_keys: bool
    forward_rows: int
    backward_rows: int
    interpret: bool | pltpu.InterpretParams
    scale: float = 1.0


class WindowBlocks(NamedTuple):
    """Keys, or values, that a block sees; each field is [W, K].

    Attributes:
      cached: the cached block, which is the one before the segment.
      before: the previous block, if it is in the segment.
      own: this block.
    """

    cached: Any
    before: Any
    own: Any

    def previous_and_own(self, first: Array) -> tuple[Array, Array]:
        """Returns the previous block and this block.

        The previous block is the cached one if `first` is True, for the first block of a segment.
        """
        return jax.lax.select(first, self.cached[...], self.before[...]), self.own[...]


class WindowKernelInputs(NamedTuple):
    """Inputs of a step of the grid, or their block specs; an input that is not needed is None.

    The fields `gradient`, `lse` and `along` are for the backward pass only.

    Attributes:
      q: [W, K], queries of the block.
      keys, values: keys and values of the previous block and of the block.
      scale: [1, 128], the length of the queries, if the kernel normalizes queries and keys.
      tile: [W, R], the bias of the slots of a block's first rows.
      dropout: the mask of kept weights, slots x rows, packed by `dropout_bits`.
      gradient: [W, K], gradient of the output.
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
    """Gradients that a step of the backward kernel writes.

    Attributes:
      q: [W, K], the gradient of the block's queries.
      keys, values: [W, K], the gradients of the keys and values of the previous block.
      cached_keys, cached_values: [W, K], gradients of the cache, written by a segment's first step.
      scale, tile: float32, the gradients of the inputs of these names, summed over all steps of a
        head.
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
    # `unseen` is added to the logits of the previous block: 0, or MASKED if the block is
    # unreadable.
    unseen: Array


def _load_blocks(
    n: Array, seen: Array, inputs: WindowKernelInputs, settings: WindowKernelSettings
) -> _LoadedBlocks:
    keys, values = (list(pair.previous_and_own(n == 0)) for pair in (inputs.keys, inputs.values))
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
        """The slots of the previous block that any row of the tile sees."""
        return slice(self.i * self.rows, None)

    def _own(self) -> Bool[Array, "R R"]:
        """Returns the mask of the tile's diagonal square, True where the slot is of the current
        block.
        """
        slot, row = (jax.lax.broadcasted_iota(jnp.int32, (self.rows, self.rows), a) for a in (0, 1))
        return slot <= row if self.attend_to_self else slot < row

    def fold(self, current: Array, before: Array) -> Float[Array, "W R"]:
        """Returns one number per slot, that of the slot's key, from the numbers of both blocks."""
        begin, rows = self.i * self.rows, self.rows
        middle = jnp.where(self._own(), current[begin:], before[:rows])
        return _stack([current[:begin], middle, before[rows:]])

    def unfold(self, x: Float[Array, "W R"], dtype: jnp.dtype) -> tuple[Array, Array]:
        """Returns the numbers of slots separately for the current and for the previous block.

        A slot that has the other block's key gets zero.
        """
        middle, own = x[self.all], self._own()
        current = _stack([x[: self.i * self.rows], jnp.where(own, middle, 0)])
        before = _stack([jnp.where(own, 0, middle), x[(self.i + 1) * self.rows :]])
        return current.astype(dtype), before.astype(dtype)

    def dropout_mask(self, words: Any) -> Bool[Array, "W R"]:
        """Returns True for weights that dropout keeps, False for the others."""
        return dropout_bits.unpack(words[:, self.all], words.shape[1])

    def rolled_bias(self, tile: Any) -> Float[Array, "W R"]:
        """Returns the bias of this tile's slots, which is the first rows' bias rolled by whole
        tiles.
        """
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
        """Returns the logits of the tile's rows and slots, with bias and mask."""
        results = self.folded_products(block.keys, own, block.unseen)
        return results if tile is None else results + self.rolled_bias(tile)

    def folded_products(
        self, pair: tuple[Array, Array], x: Float[Array, "R K"], unseen: Array | float = 0.0
    ) -> Float[Array, "W R"]:
        """Returns one product per slot: of a row of x and the slot's key, or value.

        `pair` has the keys or the values of the previous and the current block; `unseen` is added
        to the products with the previous block.
        """
        before, current = pair
        return self.fold(
            dot_float32(current[self.current], x, NT),
            dot_float32(before[self.before], x, NT) + unseen,
        )

    def weighted_sums(
        self, columns: tuple[Array, Array], current: Array, before: Array
    ) -> Float[Array, "K R"]:
        """Returns the weighted sums of the columns [K, W] of both blocks.

        `current` and `before` are the weights of the two blocks.
        """
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
    """Writes the output [W, K] and the log-sum-exp [1, W] of a block to `outputs`, both as bits.

    `cache_mask` [B, N] is not zero where a block may read the previous block.
    """
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
            weights = jnp.where(rows.dropout_mask(inputs.dropout), weights, 0.0)
        current, before = rows.unfold(weights, dtype)
        sums = rows.weighted_sums(transposed, current, before)
        y[rows.all] = to_bits((sums * (settings.scale / total)).T.astype(dtype))
        lse[:, rows.all] = to_bits(top + jnp.log(total))


def backward_kernel(
    cache_mask: Any, inputs: WindowKernelInputs, results: WindowKernelGradients,
    keys_sum: Any, values_sum: Any, *,
    settings: WindowKernelSettings,
) -> None:  # fmt: skip
    """Writes the gradients of one step to `results`.

    The grid has one step more than there are blocks, which writes the gradients of the last block.

    Args:
      cache_mask: [B, N], not zero where a block may read the previous block.
      inputs: the inputs of the step, including the gradient of the output.
      results: references to the gradients.
      keys_sum, values_sum: [2, W, K], float32 scratch memory for the gradients of keys and values
        of two consecutive blocks.
      settings: static settings.
    """
    lane, n, blocks = pl.program_id(1), pl.program_id(2), pl.num_programs(2) - 1
    before, current = n % 2, (n + 1) % 2  # indices of the two blocks in the scratch memory

    @pl.when(n == 0)
    def _start_segment() -> None:
        for total in (keys_sum, values_sum):
            total[0] = jnp.zeros_like(total[0])

    @pl.when((n == 0) & (lane == 0))
    def _start_head() -> None:
        for total in (results.scale, results.tile):
            if total is not None:
                total[...] = jnp.zeros_like(total)

    @pl.when(n < blocks)
    def _add_block() -> None:
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
        block_keys, last = inputs.keys.previous_and_own(n == 0)
        d_keys = l2_normalize_rows_backward(jax.lax.select(n < blocks, block_keys, last), d_keys)[0]
    d_keys, d_values = d_keys.astype(results.keys.dtype), d_values.astype(results.values.dtype)
    results.keys[...], results.values[...] = d_keys, d_values

    @pl.when(n == 0)
    def _write_cache_gradients() -> None:
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
    d_weights = rows.folded_products(block.values, theirs)
    if inputs.dropout is not None:
        mask = rows.dropout_mask(inputs.dropout)
        kept, d_weights = (jnp.where(mask, x, 0.0) for x in (kept, d_weights * settings.scale))
    d_logits = weights * (d_weights - inputs.along[:, rows.all])
    if results.tile is not None:
        rows.add_rolled(results.tile, d_logits)
    d_logit_parts, weight_parts = (rows.unfold(x, own.dtype) for x in (d_logits, kept))
    keys_sum[current, rows.current] += dot_float32(d_logit_parts[0], own, NN)
    values_sum[current, rows.current] += dot_float32(weight_parts[0], theirs, NN)

    @pl.when(seen)
    def _add_to_previous() -> None:
        keys_sum[before, rows.before] += dot_float32(d_logit_parts[1], own, NN)
        values_sum[before, rows.before] += dot_float32(weight_parts[1], theirs, NN)

    d_own = dot_float32(d_logit_parts[0], block.keys[1][rows.current], TN)
    d_own += dot_float32(d_logit_parts[1], block.keys[0][rows.before], TN)
    if inputs.scale is not None:
        d_own, along = l2_normalize_rows_backward(inputs.q[rows.all], d_own)
        d_own *= inputs.scale[:, :1]
        results.scale[...] += jnp.broadcast_to(jnp.sum(along, axis=0, keepdims=True), (1, LANES))
    results.q[rows.all] = d_own.astype(results.q.dtype)
