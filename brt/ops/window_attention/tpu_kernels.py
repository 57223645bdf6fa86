"""What a TPU does for one head, lane and block of window attention: see `pallas_tpu`."""

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


class Static(NamedTuple):
    """What is known when tracing.

    Attributes:
      forward_rows, backward_rows: of a tile.
      interpret: runs on any device, slowly.
      scale: what dropout multiplies weights by that stay.
    """

    attend_to_self: bool
    null_keys: bool
    forward_rows: int
    backward_rows: int
    interpret: bool | pltpu.InterpretParams
    scale: float = 1.0


class Pair(NamedTuple):
    """Keys or values [W, K] that a block sees; of the cache in the place of block -1."""

    cached: Any
    before: Any
    own: Any

    def loaded(self, first: Array) -> tuple[Array, Array]:
        """Of the block before and of this one, which is the segment's first or is not."""
        return jax.lax.select(first, self.cached[...], self.before[...]), self.own[...]


class Inputs(NamedTuple):
    """Of a step of the grid, or where they are; None: there is none.

    Attributes:
      q: [W, K] of this block.
      keys, values: of the block before, and of this one.
      scale: [1, 128], the length that queries get, where they and keys are normalised here.
      tile: [W, R], the bias of the slots of a block's first rows.
      dropout: which weights it keeps, of slots x rows as `dropout_bits`.
      gradient: [W, K] of the output; of it the rest, in the backward pass only.
      lse, along: [1, W]; the former as bits, the latter what the softmax's own gradient subtracts.
    """

    q: Any
    keys: Pair
    values: Pair
    scale: Any = None
    tile: Any = None
    dropout: Any = None
    gradient: Any = None
    lse: Any = None
    along: Any = None


class Gradients(NamedTuple):
    """Of a step of the grid; those of keys and values are of the block before.

    Attributes:
      cached_keys, cached_values: of the cache, written by a segment's first step.
      scale, tile: float32, added up over all steps of a head.
    """

    q: Any
    keys: Any
    values: Any
    cached_keys: Any
    cached_values: Any
    scale: Any
    tile: Any


class _Block(NamedTuple):
    """Both blocks, loaded; keys normalised, if they are to be."""

    keys: tuple[Array, Array]
    values: tuple[Array, Array]
    unseen: Array  # float32, added to logits of the block before


def _loaded(n: Array, seen: Array, inputs: Inputs, static: Static) -> _Block:
    keys, values = (list(pair.loaded(n == 0)) for pair in (inputs.keys, inputs.values))
    if inputs.scale is not None:
        keys = [l2_normalize_rows(x)[0].astype(x.dtype) for x in keys]
    unseen = jnp.where(seen, 0.0, MASKED)
    if static.null_keys:
        for pair in (keys, values):
            pair[0] = jax.lax.select(seen, pair[0], jnp.zeros_like(pair[0]))
        unseen = jnp.zeros(())
    return _Block((keys[0], keys[1]), (values[0], values[1]), unseen)


def _queries(inputs: Inputs, rows: "_Rows") -> Float[Array, "R K"]:
    own = inputs.q[rows.all]
    return (
        own
        if inputs.scale is None
        else (l2_normalize_rows(own)[0] * inputs.scale[:, :1]).astype(own.dtype)
    )


def _stacked(parts: list[Array]) -> Array:
    """One below the other, but for empty ones."""
    return jnp.concatenate([part for part in parts if len(part)], axis=0)


class _Rows(NamedTuple):
    """Rows i * R to (i + 1) * R of a block of W."""

    i: int
    rows: int
    attend_to_self: bool

    @property
    def all(self) -> slice:
        return slice(self.i * self.rows, (self.i + 1) * self.rows)

    @property
    def current(self) -> slice:
        """The slots of this block that any of them sees."""
        return slice(0, (self.i + 1) * self.rows)

    @property
    def before(self) -> slice:
        return slice(self.i * self.rows, None)

    def _own(self) -> Bool[Array, "R R"]:
        """Which of the slots of their own tile are of this block."""
        slot, row = (jax.lax.broadcasted_iota(jnp.int32, (self.rows, self.rows), a) for a in (0, 1))
        return slot <= row if self.attend_to_self else slot < row

    def folded(self, current: Array, before: Array) -> Float[Array, "W R"]:
        """One number a slot, of the block whose key it holds."""
        begin, rows = self.i * self.rows, self.rows
        middle = jnp.where(self._own(), current[begin:], before[:rows])
        return _stacked([current[:begin], middle, before[rows:]])

    def unfolded(self, x: Float[Array, "W R"], dtype: jnp.dtype) -> tuple[Array, Array]:
        """Of the slots of this block and of the one before; zero where they hold the other."""
        middle, own = x[self.all], self._own()
        current = _stacked([x[: self.i * self.rows], jnp.where(own, middle, 0)])
        before = _stacked([jnp.where(own, 0, middle), x[(self.i + 1) * self.rows :]])
        return current.astype(dtype), before.astype(dtype)

    def kept(self, words: Any) -> Bool[Array, "W R"]:
        """By dropout."""
        return dropout_bits.unpack(words[:, self.all], words.shape[1])

    def rolled(self, tile: Any) -> Float[Array, "W R"]:
        """The bias of their slots, from that of the first rows'."""
        if not self.i:
            return tile[...]
        cut = tile.shape[0] - self.i * self.rows
        return jnp.concatenate([tile[cut:], tile[:cut]], axis=0)

    def add_rolled(self, tile: Any, x: Float[Array, "W R"]) -> None:
        """Into that of the first rows."""
        cut, begin = tile.shape[0] - self.i * self.rows, self.i * self.rows
        tile[:cut] += x[begin:]
        if self.i:
            tile[cut:] += x[:begin]

    def logits(self, block: _Block, own: Float[Array, "R K"], tile: Any) -> Float[Array, "W R"]:
        """Of their slots."""
        found = self.against(block.keys, own, block.unseen)
        return found if tile is None else found + self.rolled(tile)

    def against(
        self, pair: tuple[Array, Array], x: Float[Array, "R K"], unseen: Array | float = 0.0
    ) -> Float[Array, "W R"]:
        """Products of what both blocks hold with rows."""
        before, current = pair
        return self.folded(
            dot_float32(current[self.current], x, NT),
            dot_float32(before[self.before], x, NT) + unseen,
        )

    def sums(
        self, columns: tuple[Array, Array], current: Array, before: Array
    ) -> Float[Array, "K R"]:
        """Of the columns [K, W] of both blocks, by the weights of slots."""
        of_current = dot_float32(columns[1][:, self.current], current, NN)
        return of_current + dot_float32(columns[0][:, self.before], before, NN)


def _tiles(window: int, rows: int, static: Static) -> list[_Rows]:
    return [_Rows(i, rows, static.attend_to_self) for i in range(window // rows)]


def forward_kernel(
    cache_mask: Any, inputs: Inputs, outputs: tuple[Any, Any], *, static: Static
) -> None:
    y, lse = outputs  # as bits
    dtype = inputs.values.own.dtype
    lane, n = pl.program_id(1), pl.program_id(2)
    block = _loaded(n, cache_mask[lane, n] > 0, inputs, static)
    transposed = block.values[0].T, block.values[1].T
    for rows in _tiles(y.shape[0], static.forward_rows, static):
        logits = rows.logits(block, _queries(inputs, rows), inputs.tile)
        top = jnp.maximum(jnp.max(logits, axis=0, keepdims=True), FLOOR)
        weights = jnp.exp(logits - top)
        total = jnp.sum(weights, axis=0, keepdims=True) + jnp.exp(FLOOR - top)
        if inputs.dropout is not None:
            weights = jnp.where(rows.kept(inputs.dropout), weights, 0.0)
        current, before = rows.unfolded(weights, dtype)
        sums = rows.sums(transposed, current, before)
        y[rows.all] = to_bits((sums * (static.scale / total)).T.astype(dtype))
        lse[:, rows.all] = to_bits(top + jnp.log(total))


def backward_kernel(
    cache_mask: Any, inputs: Inputs, found: Gradients, keys_sum: Any, values_sum: Any, *,
    static: Static,
) -> None:  # fmt: skip
    """The sums [2, W, K] are of both blocks; a step more than there are blocks writes the last."""
    lane, n, blocks = pl.program_id(1), pl.program_id(2), pl.num_programs(2) - 1
    before, current = n % 2, (n + 1) % 2  # where the sums of the two blocks are

    @pl.when(n == 0)
    def _() -> None:
        for total in (keys_sum, values_sum):
            total[0] = jnp.zeros_like(total[0])

    @pl.when((n == 0) & (lane == 0))
    def _() -> None:
        for total in (found.scale, found.tile):
            if total is not None:
                total[...] = jnp.zeros_like(total)

    @pl.when(n < blocks)
    def _() -> None:
        for total in (keys_sum, values_sum):
            total[current] = jnp.zeros_like(total[0])
        seen = cache_mask[lane, n] > 0
        block = _loaded(n, seen, inputs, static)
        for rows in _tiles(found.q.shape[0], static.backward_rows, static):
            _add_gradients(
                rows, block, inputs, found, (keys_sum, values_sum), (before, current), seen, static
            )

    d_keys, d_values = keys_sum[before], values_sum[before] * static.scale
    if inputs.scale is not None:  # the last one is no longer the block before
        of_block, last = inputs.keys.loaded(n == 0)
        d_keys = l2_normalize_rows_backward(jax.lax.select(n < blocks, of_block, last), d_keys)[0]
    d_keys, d_values = d_keys.astype(found.keys.dtype), d_values.astype(found.values.dtype)
    found.keys[...], found.values[...] = d_keys, d_values

    @pl.when(n == 0)
    def _() -> None:
        found.cached_keys[...], found.cached_values[...] = d_keys, d_values


def _add_gradients(
    rows: _Rows,
    block: _Block,
    inputs: Inputs,
    found: Gradients,
    sums: tuple[Any, Any],
    places: tuple[Array, Array],
    seen: Array,
    static: Static,
) -> None:
    """Those of some rows."""
    keys_sum, values_sum = sums
    before, current = places
    own, theirs = _queries(inputs, rows), inputs.gradient[rows.all]
    lse = from_bits(inputs.lse[:, rows.all], jnp.float32)
    weights = kept = jnp.exp(rows.logits(block, own, inputs.tile) - lse)
    d_weights = rows.against(block.values, theirs)
    if inputs.dropout is not None:
        stays = rows.kept(inputs.dropout)
        kept, d_weights = (jnp.where(stays, x, 0.0) for x in (kept, d_weights * static.scale))
    d_logits = weights * (d_weights - inputs.along[:, rows.all])
    if found.tile is not None:
        rows.add_rolled(found.tile, d_logits)
    of_keys, of_values = (rows.unfolded(x, own.dtype) for x in (d_logits, kept))
    keys_sum[current, rows.current] += dot_float32(of_keys[0], own, NN)
    values_sum[current, rows.current] += dot_float32(of_values[0], theirs, NN)

    @pl.when(seen)
    def _() -> None:
        keys_sum[before, rows.before] += dot_float32(of_keys[1], own, NN)
        values_sum[before, rows.before] += dot_float32(of_values[1], theirs, NN)

    d_own = dot_float32(of_keys[0], block.keys[1][rows.current], TN)
    d_own += dot_float32(of_keys[1], block.keys[0][rows.before], TN)
    if inputs.scale is not None:
        d_own, along = l2_normalize_rows_backward(inputs.q[rows.all], d_own)
        d_own *= inputs.scale[:, :1]
        found.scale[...] += jnp.broadcast_to(jnp.sum(along, axis=0, keepdims=True), (1, LANES))
    found.q[rows.all] = d_own.astype(found.q.dtype)
