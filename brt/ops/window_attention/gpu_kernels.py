"""What a GPU does for a tile of one head and lane of window attention: see `pallas_gpu`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from brt.ops.softmax import FLOOR

LOG2E = 1.4426950408889634  # exponentials are powers of two


class Inputs(NamedTuple):
    """Of one head and lane, or where they are; None: there is none.

    Attributes:
      band: float32, the bias as powers of two, the farthest first, between as many MASKED as
        a tile is long.
      cache_mask: int32 [N].
      dropout: int8 [W, W], not zero where weights stay.
      gradient: of the output; of it the rest, in the backward pass only.
      along: what the softmax's own gradient subtracts.
    """

    q: Any  # [T, K]
    keys: Any  # [Z, K]
    values: Any  # [Z, K]
    band: Any
    cache_mask: Any
    dropout: Any = None
    gradient: Any = None  # [T, K]
    lse: Any = None  # [T]
    along: Any = None  # [T]


class Tiles(NamedTuple):
    """Of R queries by C keys: i counts those of queries, j those of keys.

    What is by pair is [R, C], in the kernel that owns keys [C, R].

    Attributes:
      scale: what dropout multiplies weights by that stay.
    """

    inputs: Inputs
    rows: int
    columns: int
    scale: float
    transposed: bool = False

    @property
    def window(self) -> int:
        return self.inputs.keys.shape[0] - self.inputs.q.shape[0]

    def queries(self, i: Array) -> Any:
        return pl.ds(i * self.rows, self.rows)

    def keys(self, j: Array) -> Any:
        return pl.ds(j * self.columns, self.columns)

    def seen(self, i: Array) -> tuple[Array, ...]:
        """The keys that tile i of the queries sees: from, to, and the first that it may read."""
        begin = i * self.rows
        block = jax.lax.div(begin, self.window)
        cache_mask = self.inputs.cache_mask[block] > 0
        first = jnp.where(cache_mask, begin, (block + 1) * self.window)
        end = begin + self.window + self.rows
        return tuple(jax.lax.div(place, self.columns) for place in (begin, end, first))

    def readers(self, j: Array) -> tuple[Array, ...]:
        """The queries, from and to, that may read tile j of the keys."""
        begin = j * self.columns
        block = jax.lax.div(begin, self.window)
        following = jnp.minimum(block, self.inputs.cache_mask.shape[0] - 1)
        cache_mask = self.inputs.cache_mask[following] > 0
        end = jnp.where(cache_mask, begin + self.columns, block * self.window)
        places = jnp.maximum(begin - self.window, 0), jnp.minimum(end, self.inputs.q.shape[0])
        return tuple(jax.lax.div(place, self.rows) for place in places)

    def logits(self, i: Array, j: Array, products: Array) -> Float[Array, "..."]:
        """As powers of two; the band masks."""
        iota = [jax.lax.broadcasted_iota(jnp.int32, products.shape, axis) for axis in (0, 1)]
        row, column = reversed(iota) if self.transposed else iota
        nearest = max(self.rows, self.columns) - 1 + j * self.columns - i * self.rows
        return LOG2E * products + self.inputs.band[nearest + column - row]

    def kept(self, i: Array, j: Array, weights: Array) -> Array:
        """Weights behind dropout, or their gradients before it."""
        if self.inputs.dropout is None:
            return weights
        row, slot = (jax.lax.rem(place, self.window) for place in (i * self.rows, j * self.columns))
        stays = self.inputs.dropout[pl.ds(row, self.rows), pl.ds(slot, self.columns)]
        return jnp.where((stays.T if self.transposed else stays) != 0, self.scale * weights, 0.0)

    def gradients(
        self, i: Array, j: Array, products: Array, d_weights: Array
    ) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
        """The weights behind dropout, and the logits' gradient, of both operands' products."""
        lse, along = (
            jnp.expand_dims(x[self.queries(i)], 0 if self.transposed else 1)
            for x in (self.inputs.lse, self.inputs.along)
        )
        weights = jnp.exp2(self.logits(i, j, products) - LOG2E * lse)
        d_weights = self.kept(i, j, d_weights)
        return self.kept(i, j, weights), weights * (d_weights - along)


def product(a: Array, b: Array) -> Float[Array, "..."]:
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def where(may_read: Any, x: Array) -> Array:
    return x if may_read is True else jnp.where(may_read, x, 0.0)


def window_attention_forward(
    inputs: Inputs, y: Any, lse: Any, *, rows: int, columns: int, null_keys: bool, scale: float
) -> None:
    """Of a tile of queries; the softmax of the keys so far is rescaled by each further tile.

    Null keys come first. They are zeros, as their values are: they add to the total alone.
    """
    tiles, i = Tiles(inputs, rows, columns, scale), pl.program_id(0)
    own, (begin, end, first) = inputs.q[tiles.queries(i)], tiles.seen(i)

    def weigh(logits: Array, top: Array, total: Array) -> tuple[Array, Array, Array, Array]:
        higher = jnp.maximum(top, jnp.max(logits, axis=1))
        weights, shrunk = jnp.exp2(logits - higher[:, None]), jnp.exp2(top - higher)
        return weights, shrunk, higher, total * shrunk + jnp.sum(weights, axis=1)

    def add_null(j: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        _, _, top, total = weigh(tiles.logits(i, j, jnp.zeros((rows, columns))), *carry)
        return top, total

    def add(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        read, top, total = carry
        keys, values = (x[tiles.keys(j)] for x in (inputs.keys, inputs.values))
        weights, shrunk, top, total = weigh(tiles.logits(i, j, product(own, keys.T)), top, total)
        kept = tiles.kept(i, j, weights).astype(values.dtype)
        return read * shrunk[:, None] + product(kept, values), top, total

    # The virtual key that takes the mass of rows without keys: see `softmax.FLOOR`.
    start = jnp.full(rows, LOG2E * FLOOR), jnp.ones(rows)
    if null_keys:
        start = jax.lax.fori_loop(begin, first, add_null, start)
    zeros = jnp.zeros(own.shape, jnp.float32)
    read, top, total = jax.lax.fori_loop(first, end, add, (zeros, *start))
    y[tiles.queries(i)] = (read / total[:, None]).astype(y.dtype)
    lse[tiles.queries(i)] = (top + jnp.log2(total)) / LOG2E


def window_attention_queries(
    inputs: Inputs, d_q: Any, *, rows: int, columns: int, null_keys: bool, scale: float
) -> None:
    """The gradient of a tile of queries, to which null keys add nothing."""
    del null_keys
    tiles, i = Tiles(inputs, rows, columns, scale), pl.program_id(0)
    own, theirs = inputs.q[tiles.queries(i)], inputs.gradient[tiles.queries(i)]
    _, end, first = tiles.seen(i)

    def add(j: Array, total: Array) -> Array:
        keys, values = (x[tiles.keys(j)] for x in (inputs.keys, inputs.values))
        pair = product(own, keys.T), product(theirs, values.T)
        _, d_logits = tiles.gradients(i, j, *pair)
        return total + product(d_logits.astype(keys.dtype), keys)

    found = jax.lax.fori_loop(first, end, add, jnp.zeros(own.shape, jnp.float32))
    d_q[tiles.queries(i)] = found.astype(d_q.dtype)


def window_attention_keys(
    inputs: Inputs, d_keys: Any, d_values: Any, *,
    rows: int, columns: int, null_keys: bool, scale: float,
) -> None:  # fmt: skip
    """The gradients of a tile of keys and values, of the queries that may read it."""
    del null_keys
    tiles, j = Tiles(inputs, rows, columns, scale, transposed=True), pl.program_id(0)
    keys, values = (x[tiles.keys(j)] for x in (inputs.keys, inputs.values))

    def add(i: Array, totals: tuple[Array, Array]) -> tuple[Array, Array]:
        q, gradient = (x[tiles.queries(i)] for x in (inputs.q, inputs.gradient))
        pair = product(keys, q.T), product(values, gradient.T)
        kept, d_logits = tiles.gradients(i, j, *pair)
        of_keys = totals[0] + product(d_logits.astype(q.dtype), q)
        return of_keys, totals[1] + product(kept.astype(gradient.dtype), gradient)

    (begin, end), zeros = tiles.readers(j), jnp.zeros(keys.shape, jnp.float32)
    of_keys, of_values = jax.lax.fori_loop(begin, end, add, (zeros, zeros))
    d_keys[tiles.keys(j)] = of_keys.astype(d_keys.dtype)
    d_values[tiles.keys(j)] = of_values.astype(d_values.dtype)


def window_attention_band(
    inputs: Inputs, d_tile: Any, *,
    rows: int, columns: int, null_keys: bool, scale: float, walk: int,
) -> None:  # fmt: skip
    """The gradient of what tiles at one distance add to logits, over `walk` tiles of queries."""
    tiles, distance = Tiles(inputs, rows, columns, scale), pl.program_id(0)
    begin = jax.lax.rem(pl.program_id(2), inputs.q.shape[0] // rows // walk) * walk

    def add(i: Array, total: Array) -> Array:
        farthest, _, first = tiles.seen(i)
        j = farthest + distance
        pair = (
            product(inputs.q[tiles.queries(i)], inputs.keys[tiles.keys(j)].T),
            product(inputs.gradient[tiles.queries(i)], inputs.values[tiles.keys(j)].T),
        )
        if null_keys:  # which are zeros, as their values are
            pair = where(j >= first, pair[0]), where(j >= first, pair[1])
        _, d_logits = tiles.gradients(i, j, *pair)
        return total + (d_logits if null_keys else where(j >= first, d_logits))

    zeros = jnp.zeros((rows, columns), jnp.float32)
    d_tile[...] = jax.lax.fori_loop(begin, begin + walk, add, zeros)
