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
      band: float32 [W + 2R], the bias as powers of two, the farthest first, MASKED around it.
      readable: int32 [N].
      dropout: [W, W].
      gradient: of the output; of it the rest, in the backward pass only.
      along: what the softmax's own gradient subtracts.
    """

    q: Any  # [T, K]
    keys: Any  # [Z, K]
    values: Any  # [Z, K]
    band: Any
    readable: Any
    dropout: Any = None
    gradient: Any = None  # [T, K]
    lse: Any = None  # [T]
    along: Any = None  # [T]


class Tiles(NamedTuple):
    """Of R tokens: tile i of the queries sees the tiles i to i + m of the keys, m = W / R.

    Logits are [R, R], with the queries along axis 0 or 1.
    """

    inputs: Inputs
    rows: int
    null_keys: bool
    queries: int = 0

    @property
    def last(self) -> int:
        """m, the stretch of a tile's own keys."""
        return (self.inputs.keys.shape[0] - self.inputs.q.shape[0]) // self.rows

    @property
    def count(self) -> int:
        """Of tiles of queries."""
        return self.inputs.q.shape[0] // self.rows

    def at(self, i: Array) -> pl.Slice:
        return pl.ds(i * self.rows, self.rows)

    def first(self, i: Array) -> Array:
        """The first stretch that tile i may read."""
        readable = self.inputs.readable[jax.lax.div(i, self.last)] > 0
        return jnp.where(readable, 0, self.last - jax.lax.rem(i, self.last))

    def readers(self, j: Array) -> tuple[Array, Array]:
        """The tiles of queries, from and to, that may read tile j of the keys."""
        block = jax.lax.div(j, self.last)
        following = jnp.minimum(block, self.inputs.readable.shape[0] - 1)
        end = jnp.where(self.inputs.readable[following] > 0, j + 1, block * self.last)
        return jnp.maximum(j - self.last, 0), jnp.minimum(end, self.count)

    def logits(self, s: Array, products: Array, seen: Array) -> Float[Array, "R R"]:
        """As powers of two; masked ones by the band."""
        iota = [jax.lax.broadcasted_iota(jnp.int32, products.shape, axis) for axis in (0, 1)]
        place = (s + 1) * self.rows - 1 + iota[1 - self.queries] - iota[self.queries]
        return LOG2E * self.if_null(products, seen) + self.inputs.band[place]

    def if_null(self, x: Array, seen: Array) -> Array:
        """Null keys and their values are zeros."""
        return x * seen if self.null_keys else x

    def kept(self, i: Array, s: Array, weights: Array) -> Array:
        """Weights behind dropout, or their gradients before it."""
        if self.inputs.dropout is None:
            return weights
        row, slot = (jax.lax.rem(x, self.last) for x in (i, i + s))
        factors = self.inputs.dropout[self.at(row), self.at(slot)]
        return weights * (factors.T if self.queries else factors)

    def gradients(
        self, i: Array, s: Array, products: Array, d_weights: Array, seen: Array
    ) -> tuple[Float[Array, "R R"], Float[Array, "R R"]]:
        """The weights behind dropout, and the logits' gradient, of both operands' products."""
        lse, along = (
            jnp.expand_dims(x[self.at(i)], 1 - self.queries)
            for x in (self.inputs.lse, self.inputs.along)
        )
        weights = jnp.exp2(self.logits(s, products, seen) - LOG2E * lse)
        d_weights = self.kept(i, s, self.if_null(d_weights, seen))
        return self.kept(i, s, weights), weights * (d_weights - along)


def _product(a: Array, b: Array) -> Float[Array, "..."]:
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def _seen(s: Array, first: Array) -> Array:
    return jnp.where(s >= first, 1.0, 0.0)


def window_attention_forward(
    inputs: Inputs, y: Any, lse: Any, *, rows: int, null_keys: bool
) -> None:
    """Of a tile of queries; the softmax of the stretches so far is rescaled by each further one."""
    tiles, i = Tiles(inputs, rows, null_keys), pl.program_id(0)
    own, first = inputs.q[tiles.at(i)], tiles.first(i)

    def add(s: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        read, top, total = carry
        at, seen = tiles.at(i + s), _seen(s, first)
        logits = tiles.logits(s, _product(own, inputs.keys[at].T), seen)
        higher = jnp.maximum(top, jnp.max(logits, axis=1))
        weights, shrunk = jnp.exp2(logits - higher[:, None]), jnp.exp2(top - higher)
        total = total * shrunk + jnp.sum(weights, axis=1)
        kept = tiles.kept(i, s, tiles.if_null(weights, seen))
        values = inputs.values[at]
        return read * shrunk[:, None] + _product(kept.astype(values.dtype), values), higher, total

    # The virtual key that takes the mass of rows without keys: see `softmax.FLOOR`.
    start = jnp.zeros(own.shape, jnp.float32), jnp.full(rows, LOG2E * FLOOR), jnp.ones(rows)
    begin = 0 if null_keys else first
    read, top, total = jax.lax.fori_loop(begin, tiles.last + 1, add, start)
    y[tiles.at(i)] = (read / total[:, None]).astype(y.dtype)
    lse[tiles.at(i)] = (top + jnp.log2(total)) / LOG2E


def window_attention_queries(inputs: Inputs, d_q: Any, *, rows: int, null_keys: bool) -> None:
    """The gradient of a tile of queries."""
    tiles, i = Tiles(inputs, rows, null_keys), pl.program_id(0)
    own, theirs, first = inputs.q[tiles.at(i)], inputs.gradient[tiles.at(i)], tiles.first(i)

    def add(s: Array, total: Array) -> Array:
        at, seen = tiles.at(i + s), _seen(s, first)
        keys = inputs.keys[at]
        products, d_weights = _product(own, keys.T), _product(theirs, inputs.values[at].T)
        _, d_logits = tiles.gradients(i, s, products, d_weights, seen)
        return total + _product(tiles.if_null(d_logits, seen).astype(keys.dtype), keys)

    begin, zeros = 0 if null_keys else first, jnp.zeros(own.shape, jnp.float32)
    d_q[tiles.at(i)] = jax.lax.fori_loop(begin, tiles.last + 1, add, zeros).astype(d_q.dtype)


def window_attention_keys(
    inputs: Inputs, d_keys: Any, d_values: Any, *, rows: int, null_keys: bool
) -> None:
    """The gradients of a tile of keys and values, of the queries that may read it."""
    tiles, j = Tiles(inputs, rows, null_keys, queries=1), pl.program_id(0)
    keys, values = inputs.keys[tiles.at(j)], inputs.values[tiles.at(j)]

    def add(i: Array, totals: tuple[Array, Array]) -> tuple[Array, Array]:
        q, gradient = inputs.q[tiles.at(i)], inputs.gradient[tiles.at(i)]
        products, d_weights = _product(keys, q.T), _product(values, gradient.T)
        kept, d_logits = tiles.gradients(i, j - i, products, d_weights, jnp.ones(()))
        of_keys = totals[0] + _product(d_logits.astype(q.dtype), q)
        return of_keys, totals[1] + _product(kept.astype(gradient.dtype), gradient)

    zeros = jnp.zeros(keys.shape, jnp.float32)
    of_keys, of_values = jax.lax.fori_loop(*tiles.readers(j), add, (zeros, zeros))
    d_keys[tiles.at(j)] = of_keys.astype(d_keys.dtype)
    d_values[tiles.at(j)] = of_values.astype(d_values.dtype)


def window_attention_band(
    inputs: Inputs, d_tile: Any, *, rows: int, null_keys: bool, walk: int
) -> None:
    """The gradient of what one stretch adds to logits, summed over `walk` tiles of queries."""
    tiles, s = Tiles(inputs, rows, null_keys), pl.program_id(0)
    begin = jax.lax.rem(pl.program_id(2), tiles.count // walk) * walk

    def add(i: Array, total: Array) -> Array:
        at, seen = tiles.at(i + s), _seen(s, tiles.first(i))
        products = _product(inputs.q[tiles.at(i)], inputs.keys[at].T)
        d_weights = _product(inputs.gradient[tiles.at(i)], inputs.values[at].T)
        _, d_logits = tiles.gradients(i, s, products, d_weights, seen)
        return total + (d_logits if null_keys else d_logits * seen)

    zeros = jnp.zeros((rows, rows), jnp.float32)
    d_tile[...] = jax.lax.fori_loop(begin, begin + walk, add, zeros)
