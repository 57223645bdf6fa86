"""What a TPU does for one head, lane and block of window attention: see `pallas_tpu`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float

from brt.ops.softmax import FLOOR, MASKED

_BY_ROW = (((1,), (1,)), ((), ()))  # a b^T
_BY_SLOT = (((0,), (0,)), ((), ()))  # a^T b
_PLAIN = (((1,), (0,)), ((), ()))  # a b


class Static(NamedTuple):
    """What is known when tracing.

    Attributes:
      forward_rows, backward_rows: of a tile.
      interpret: runs on any device, slowly.
    """

    attend_to_self: bool
    null_keys: bool
    forward_rows: int
    backward_rows: int
    interpret: bool | pltpu.InterpretParams


class _Block(NamedTuple):
    """What a step of the grid has loaded."""

    q: Any
    before: tuple[Array, Array]  # keys and values
    current: tuple[Array, Array]
    unseen: Array  # float32, added to logits of the block before


def _loaded(seen: Array, q: Any, refs: tuple[Any, ...], static: Static) -> _Block:
    k_before, k, v_before, v = (ref[...] for ref in refs)
    unseen = jnp.where(seen, 0.0, MASKED)
    if static.null_keys:
        k_before, v_before = (
            jax.lax.select(seen, x, jnp.zeros_like(x)) for x in (k_before, v_before)
        )
        unseen = jnp.zeros(())
    return _Block(q, (k_before, v_before), (k, v), unseen)


def _product(a: Array, b: Array, axes: tuple) -> Array:
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(a, b, axes, precision=precision, preferred_element_type=jnp.float32)


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

    def against(self, block: _Block, which: int, x: Float[Array, "R K"]) -> Float[Array, "W R"]:
        """Products of keys (0) or values (1) with rows."""
        current, before = block.current[which], block.before[which]
        unseen = block.unseen if which == 0 else 0.0
        return self.folded(
            _product(current[self.current], x, _BY_ROW),
            _product(before[self.before], x, _BY_ROW) + unseen,
        )

    def sums(
        self, columns: tuple[Array, Array], current: Array, before: Array
    ) -> Float[Array, "K R"]:
        """Of the columns [K, W] of this block and of the one before, by the weights of slots."""
        of_current = _product(columns[0][:, self.current], current, _PLAIN)
        return of_current + _product(columns[1][:, self.before], before, _PLAIN)


def _tiles(window: int, rows: int, static: Static) -> list[_Rows]:
    return [_Rows(i, rows, static.attend_to_self) for i in range(window // rows)]


def forward_kernel(readable: Any, q: Any, *refs: Any, static: Static, biased: bool) -> None:
    *pairs, y, lse = refs
    seen = readable[pl.program_id(1), pl.program_id(2)] > 0
    block = _loaded(seen, q, tuple(pairs[:4]), static)
    tile, dropout = _optional(pairs[4:], biased)
    transposed = block.current[1].T, block.before[1].T
    for rows in _tiles(q.shape[0], static.forward_rows, static):
        logits = rows.against(block, 0, q[rows.all])
        if tile is not None:
            logits += rows.rolled(tile)
        top = jnp.maximum(jnp.max(logits, axis=0, keepdims=True), FLOOR)
        weights = jnp.exp(logits - top)
        total = jnp.sum(weights, axis=0, keepdims=True) + jnp.exp(FLOOR - top)
        if dropout is not None:
            weights *= dropout[:, rows.all]
        current, before = rows.unfolded(weights, y.dtype)
        sums = rows.sums(transposed, current, before)
        y[rows.all] = (sums / total).T.astype(y.dtype)
        lse[:, rows.all] = top + jnp.log(total)


def _optional(refs: Any, biased: bool) -> tuple[Any, Any]:
    """The bias's tile and the dropout, each of which may not be there."""
    tile = refs[0] if biased else None
    rest = refs[int(biased) :]
    return tile, rest[0] if rest else None


def backward_kernel(readable: Any, q: Any, *all_refs: Any, static: Static, biased: bool) -> None:
    *refs, keys_sum, values_sum = all_refs
    count = 3 + biased
    pairs, (gradient, lse, along), rest = refs[:4], refs[4:7], refs[7:-count]
    d_q, d_k, d_v, *d_tile = refs[-count:]
    tile, dropout = _optional(rest, biased)
    lane, n, blocks = pl.program_id(1), pl.program_id(2), pl.num_programs(2) - 1
    before, current = n % 2, (n + 1) % 2  # where the sums of the two blocks are

    @pl.when(n == 0)
    def _() -> None:
        for total in (keys_sum, values_sum):
            total[0] = jnp.zeros_like(total[0])

    @pl.when((n == 0) & (lane == 0))
    def _() -> None:
        for total in d_tile:
            total[...] = jnp.zeros_like(total)

    @pl.when(n < blocks)
    def _() -> None:
        for total in (keys_sum, values_sum):
            total[current] = jnp.zeros_like(total[0])
        seen = readable[lane, n] > 0
        block = _loaded(seen, q, tuple(pairs), static)
        for rows in _tiles(q.shape[0], static.backward_rows, static):
            own, theirs = q[rows.all], gradient[rows.all]
            logits = rows.against(block, 0, own)
            if biased:
                logits += rows.rolled(tile)
            weights = kept = jnp.exp(logits - lse[:, rows.all])
            d_weights = rows.against(block, 1, theirs)
            if dropout is not None:
                kept, d_weights = kept * dropout[:, rows.all], d_weights * dropout[:, rows.all]
            d_logits = weights * (d_weights - along[:, rows.all])
            if biased:
                rows.add_rolled(d_tile[0], d_logits)
            of_keys, of_values = (rows.unfolded(x, q.dtype) for x in (d_logits, kept))
            keys_sum[current, rows.current] += _product(of_keys[0], own, _PLAIN)
            values_sum[current, rows.current] += _product(of_values[0], theirs, _PLAIN)

            @pl.when(seen)
            def _(rows=rows, own=own, theirs=theirs, of_keys=of_keys, of_values=of_values) -> None:
                keys_sum[before, rows.before] += _product(of_keys[1], own, _PLAIN)
                values_sum[before, rows.before] += _product(of_values[1], theirs, _PLAIN)

            found = _product(of_keys[0], block.current[0][rows.current], _BY_SLOT)
            found += _product(of_keys[1], block.before[0][rows.before], _BY_SLOT)
            d_q[rows.all] = found.astype(d_q.dtype)

    d_k[...] = keys_sum[before].astype(d_k.dtype)
    d_v[...] = values_sum[before].astype(d_v.dtype)
