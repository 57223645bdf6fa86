"""Bodies of the Triton kernels of window attention; `pallas_gpu` describes the algorithm.

A program computes the results of one tile of R queries or C keys of one head and one row of the
batch. Keys before the document count as zero keys if `null_keys`, and `scale` is the factor of the
weights that dropout keeps. In shapes, W is the number of tokens of a window, and Z = W + T of keys
with the W cached ones. Documents start only at starts of the D parts of a segment, and none starts
inside of one of the E groups of keys. A place is the index of a token in the segment, negative for
cached tokens.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from brt.ops.gpu import LOG2E, dot_float32, update_softmax
from brt.ops.softmax import FLOOR


class WindowTileInputs(NamedTuple):
    """Arrays of one head and one row of the batch, or their block specs; None if not needed."""

    q: Any  # The queries [T, K].
    keys: Any  # The cached keys and those of the segment [Z, K].
    values: Any  # The cached values and those of the segment [Z, K].
    # The bias of each distance times log2(e), the farthest key first, float32 [W + 2 max(R, C)]. It
    # is padded on both sides with MASKED, a very low logit, for keys of a tile that are outside of
    # a query's window.
    band: Any
    first: Any  # The place of the first token of each part's document, int32 [D].
    ends: Any  # The place where the next document after a group of keys starts, or T; int32 [E].
    # Not zero for weights that dropout keeps, int8 [W, W]: query of a block and slot, as in
    # `api.window_part`.
    dropout: Any = None
    # The following fields are for the backward pass only.
    gradient: Any = None  # The gradient of the output [T, K].
    lse: Any = None  # The log-sum-exp of each query's logits [T].
    # The number that the gradient of the softmax subtracts for each query [T]: the sum over the
    # keys of the weight times the weight's gradient, minus the gradient of `lse`.
    along: Any = None


class WindowTiles(NamedTuple):
    """The logits of one head and one row of the batch, in tiles.

    In the methods, i is the index of a tile of queries and j the index of a tile of keys.
    """

    inputs: WindowTileInputs
    rows: int  # The number R of queries of a tile.
    columns: int  # The number C of keys of a tile.
    scale: float
    # True if the axes of logits and weights are [C, R] instead of [R, C], as in the kernel that
    # computes the gradients of a tile of keys.
    transposed: bool = False

    @property
    def window(self) -> int:
        return self.inputs.keys.shape[0] - self.inputs.q.shape[0]

    def queries(self, i: Array) -> Any:
        return pl.ds(i * self.rows, self.rows)

    def keys(self, j: Array) -> Any:
        return pl.ds(j * self.columns, self.columns)

    def key_tile_range(self, i: Array) -> tuple[Array, ...]:
        """Returns the first key tile in the window of query tile i, the window's end, and a third
        index.

        The third index is that of the first key tile in the window that belongs to the document of
        the queries.
        """
        begin, part = i * self.rows, self.inputs.q.shape[0] // self.inputs.first.shape[0]
        first = self.window + self.inputs.first[jax.lax.div(begin, part)]
        first, end = jnp.maximum(begin, first), begin + self.window + self.rows
        return tuple(jax.lax.div(place, self.columns) for place in (begin, end, first))

    def query_tile_range(self, j: Array) -> tuple[Array, ...]:
        """Returns the first query tile that may read key tile j, and the end (exclusive)."""
        begin, group = j * self.columns, self.inputs.keys.shape[0] // self.inputs.ends.shape[0]
        end = self.inputs.ends[jax.lax.div(begin, group)]
        places = jnp.maximum(begin - self.window, 0), jnp.minimum(end, begin + self.columns)
        return tuple(jax.lax.div(place, self.rows) for place in places)

    def logits(self, i: Array, j: Array, products: Array) -> Float[Array, "..."]:
        """Returns the logits, with bias and mask, times log2(e), in the layout of `products`."""
        iota = [jax.lax.broadcasted_iota(jnp.int32, products.shape, axis) for axis in (0, 1)]
        row, column = reversed(iota) if self.transposed else iota
        nearest = max(self.rows, self.columns) - 1 + j * self.columns - i * self.rows
        return LOG2E * products + self.inputs.band[nearest + column - row]

    def apply_dropout(self, i: Array, j: Array, weights: Array) -> Array:
        """Applies dropout to the weights of two tiles, or to gradients of these weights."""
        if self.inputs.dropout is None:
            return weights
        row, slot = (jax.lax.rem(place, self.window) for place in (i * self.rows, j * self.columns))
        stays = self.inputs.dropout[pl.ds(row, self.rows), pl.ds(slot, self.columns)]
        return jnp.where((stays.T if self.transposed else stays) != 0, self.scale * weights, 0.0)

    def gradients(
        self, i: Array, j: Array, products: Array, d_weights: Array
    ) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
        """Returns the weights of two tiles after dropout, and the gradient of their logits.

        `products` are the dot products of queries and keys. `d_weights` are those of the gradients
        of the outputs and the values, which are the gradients of the weights after dropout.
        """
        lse, along = (
            jnp.expand_dims(x[self.queries(i)], 0 if self.transposed else 1)
            for x in (self.inputs.lse, self.inputs.along)
        )
        weights = jnp.exp2(self.logits(i, j, products) - LOG2E * lse)
        d_weights = self.apply_dropout(i, j, d_weights)
        return self.apply_dropout(i, j, weights), weights * (d_weights - along)


def zero_unless(may_read: Any, x: Array) -> Array:
    """Returns x or, if not `may_read`, zeros. The Python constant True adds no code to a kernel."""
    return x if may_read is True else jnp.where(may_read, x, 0.0)


def window_attention_forward(
    inputs: WindowTileInputs,
    y: Any,
    lse: Any,
    *,
    rows: int,
    columns: int,
    null_keys: bool,
    scale: float,
) -> None:
    """Writes a tile of the output y [T, K] and of its log-sum-exp, with a running softmax."""
    tiles, i = WindowTiles(inputs, rows, columns, scale), pl.program_id(0)
    own, (begin, end, first) = inputs.q[tiles.queries(i)], tiles.key_tile_range(i)

    def add_null_keys(j: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        _, _, top, total = update_softmax(tiles.logits(i, j, jnp.zeros((rows, columns))), *carry)
        return top, total

    def add_key_tile(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        # These are the weighted sums of values, the maximum logits, and the sums of weights.
        read, top, total = carry
        keys, values = (x[tiles.keys(j)] for x in (inputs.keys, inputs.values))
        weights, shrunk, top, total = update_softmax(
            tiles.logits(i, j, dot_float32(own, keys.T)), top, total
        )
        kept = tiles.apply_dropout(i, j, weights).astype(values.dtype)
        return read * shrunk[:, None] + dot_float32(kept, values), top, total

    # The running softmax starts with an additional logit, `softmax.FLOOR`, which belongs to no key.
    # In rows without visible keys, this logit has all the weight, so that the output is zero. In
    # other rows its weight is zero, because FLOOR is far below the logits of visible keys.
    start = jnp.full(rows, LOG2E * FLOOR), jnp.ones(rows)
    # The values of null keys count as zero, too, so these keys add only to the sums of weights.
    if null_keys:
        start = jax.lax.fori_loop(begin, first, add_null_keys, start)
    zeros = jnp.zeros(own.shape, jnp.float32)
    read, top, total = jax.lax.fori_loop(first, end, add_key_tile, (zeros, *start))
    y[tiles.queries(i)] = (read / total[:, None]).astype(y.dtype)
    lse[tiles.queries(i)] = (top + jnp.log2(total)) / LOG2E


def window_attention_queries(
    inputs: WindowTileInputs, d_q: Any, *, rows: int, columns: int, null_keys: bool, scale: float
) -> None:
    """Writes a tile of d_q [T, K], the gradient of the queries."""
    del null_keys  # Zero keys contribute nothing to the gradient of queries.
    tiles, i = WindowTiles(inputs, rows, columns, scale), pl.program_id(0)
    own, theirs = inputs.q[tiles.queries(i)], inputs.gradient[tiles.queries(i)]
    _, end, first = tiles.key_tile_range(i)

    def add_key_tile(j: Array, total: Array) -> Array:
        keys, values = (x[tiles.keys(j)] for x in (inputs.keys, inputs.values))
        pair = dot_float32(own, keys.T), dot_float32(theirs, values.T)
        _, d_logits = tiles.gradients(i, j, *pair)
        return total + dot_float32(d_logits.astype(keys.dtype), keys)

    results = jax.lax.fori_loop(first, end, add_key_tile, jnp.zeros(own.shape, jnp.float32))
    d_q[tiles.queries(i)] = results.astype(d_q.dtype)


def window_attention_keys(
    inputs: WindowTileInputs, d_keys: Any, d_values: Any, *,
    rows: int, columns: int, null_keys: bool, scale: float,
) -> None:  # fmt: skip
    """Writes a tile of d_keys and d_values [Z, K], in a loop over the queries that may read it."""
    del null_keys  # Keys that count as zero keys receive no gradient.
    tiles, j = WindowTiles(inputs, rows, columns, scale, transposed=True), pl.program_id(0)
    keys, values = (x[tiles.keys(j)] for x in (inputs.keys, inputs.values))

    def add_query_tile(i: Array, totals: tuple[Array, Array]) -> tuple[Array, Array]:
        q, gradient = (x[tiles.queries(i)] for x in (inputs.q, inputs.gradient))
        pair = dot_float32(keys, q.T), dot_float32(values, gradient.T)
        kept, d_logits = tiles.gradients(i, j, *pair)
        keys_total = totals[0] + dot_float32(d_logits.astype(q.dtype), q)
        return keys_total, totals[1] + dot_float32(kept.astype(gradient.dtype), gradient)

    (begin, end), zeros = tiles.query_tile_range(j), jnp.zeros(keys.shape, jnp.float32)
    keys_total, values_total = jax.lax.fori_loop(begin, end, add_query_tile, (zeros, zeros))
    d_keys[tiles.keys(j)] = keys_total.astype(d_keys.dtype)
    d_values[tiles.keys(j)] = values_total.astype(d_values.dtype)


def window_attention_band(
    inputs: WindowTileInputs, d_tile: Any, *,
    rows: int, columns: int, null_keys: bool, scale: float, tiles_per_program: int,
) -> None:  # fmt: skip
    """Writes d_tile [R, C], a sum of gradients of logits from which the bias's gradient follows.

    The sum is over `tiles_per_program` pairs of a query tile and a key tile. The distance between
    the two tiles is the same in all pairs, and so is the bias of each entry of their logits.
    """
    tiles, distance = WindowTiles(inputs, rows, columns, scale), pl.program_id(0)
    begin = (
        jax.lax.rem(pl.program_id(2), inputs.q.shape[0] // rows // tiles_per_program)
        * tiles_per_program
    )

    def add_query_tile(i: Array, total: Array) -> Array:
        # The key tile is `distance` tiles after the start of the window of query tile i.
        farthest, _, first = tiles.key_tile_range(i)
        j = farthest + distance
        pair = (
            dot_float32(inputs.q[tiles.queries(i)], inputs.keys[tiles.keys(j)].T),
            dot_float32(inputs.gradient[tiles.queries(i)], inputs.values[tiles.keys(j)].T),
        )
        # With null keys, zeros take the place of the keys and values before the document, so their
        # dot products are zero.
        if null_keys:
            pair = zero_unless(j >= first, pair[0]), zero_unless(j >= first, pair[1])
        _, d_logits = tiles.gradients(i, j, *pair)
        return total + (d_logits if null_keys else zero_unless(j >= first, d_logits))

    zeros = jnp.zeros((rows, columns), jnp.float32)
    d_tile[...] = jax.lax.fori_loop(begin, begin + tiles_per_program, add_query_tile, zeros)
