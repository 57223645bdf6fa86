"""Bodies of the Triton kernels of window attention; `pallas_gpu` describes the algorithm.

A program of a kernel sees the arrays of one head and one lane (row of the batch) and computes the
results of one tile of queries or of keys.

In shapes, T is the number of tokens of a segment, W of tokens of a window, and K of numbers of a
head; Z = W + T includes the W tokens before the segment. A segment is split into D parts, and
documents start only at starts of parts. The Z keys are split into E groups that no document's start
divides. A place is the index of a token in the segment; earlier tokens have negative places.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from brt.ops.gpu import LOG2E, dot_float32, update_softmax
from brt.ops.softmax import FLOOR


class WindowTileInputs(NamedTuple):
    """Input arrays of a kernel for one head and lane, or their block specs; unused arrays are None.

    The fields `gradient`, `lse` and `along` are for the backward pass only.

    Attributes:
      q: [T, K], queries.
      keys, values: [Z, K], the keys and values of the window before the segment and of the segment.
      band: float32 [W + 2 max(R, C)] for tiles of R queries and C keys, the bias of each distance
        times log2(e), the farthest key first. The band is padded on both sides with MASKED, a very
        low logit, for keys of a tile that are outside of a query's window.
      first: int32 [D], for each part, the place of the first token of its document.
      ends: int32 [E], for each group of keys, the place where the next document starts; T if no
        document starts after the keys.
      dropout: int8 [W, W], not zero for weights that dropout keeps.
      gradient: [T, K], gradient of the output.
      lse: [T], the log-sum-exp of each query's logits.
      along: [T], for each query the number that the gradient of the softmax subtracts: the sum
        over the keys of the weight times the weight's gradient, minus the gradient of `lse`.
    """

    q: Any
    keys: Any
    values: Any
    band: Any
    first: Any
    ends: Any
    dropout: Any = None
    gradient: Any = None
    lse: Any = None
    along: Any = None


class WindowTiles(NamedTuple):
    """The logits of one head and lane, in tiles of R queries and C keys.

    In the methods, i is the index of a query tile and j the index of a key tile.

    Attributes:
      inputs: the arrays of one head and lane.
      rows: R, the number of queries of a tile.
      columns: C, the number of keys of a tile.
      scale: the number by which dropout multiplies the weights that it keeps.
      transposed: True if logits and weights are [C, R] instead of [R, C], as in the kernel that
        computes the gradients of a tile of keys.
    """

    inputs: WindowTileInputs
    rows: int
    columns: int
    scale: float
    transposed: bool = False

    @property
    def window(self) -> int:
        """The number of tokens of a window."""
        return self.inputs.keys.shape[0] - self.inputs.q.shape[0]

    def queries(self, i: Array) -> Any:
        """Returns the index slice of the queries of query tile i."""
        return pl.ds(i * self.rows, self.rows)

    def keys(self, j: Array) -> Any:
        """Returns the index slice of the keys of key tile j."""
        return pl.ds(j * self.columns, self.columns)

    def key_tile_range(self, i: Array) -> tuple[Array, ...]:
        """Returns the range of key tiles in the window of query tile i.

        The three results are the index of the first key tile of the window, the end of the range
        (exclusive), and the index of the first key tile of the window that is in the queries'
        document. The last one is greater than the first one if the document starts within the
        window.
        """
        begin, part = i * self.rows, self.inputs.q.shape[0] // self.inputs.first.shape[0]
        first = self.window + self.inputs.first[jax.lax.div(begin, part)]
        first, end = jnp.maximum(begin, first), begin + self.window + self.rows
        return tuple(jax.lax.div(place, self.columns) for place in (begin, end, first))

    def query_tile_range(self, j: Array) -> tuple[Array, ...]:
        """Returns the range of query tiles that may read key tile j: the first index and the end
        (exclusive).
        """
        begin, group = j * self.columns, self.inputs.keys.shape[0] // self.inputs.ends.shape[0]
        end = self.inputs.ends[jax.lax.div(begin, group)]
        places = jnp.maximum(begin - self.window, 0), jnp.minimum(end, begin + self.columns)
        return tuple(jax.lax.div(place, self.rows) for place in places)

    def logits(self, i: Array, j: Array, products: Array) -> Float[Array, "..."]:
        """Returns the logits of query tile i and key tile j, with bias and mask, times log2(e).

        `products` has the dot products of the queries and keys of both tiles, [R, C] or, if
        `transposed`, [C, R]. The result has the same layout.
        """
        iota = [jax.lax.broadcasted_iota(jnp.int32, products.shape, axis) for axis in (0, 1)]
        row, column = reversed(iota) if self.transposed else iota
        nearest = max(self.rows, self.columns) - 1 + j * self.columns - i * self.rows
        return LOG2E * products + self.inputs.band[nearest + column - row]

    def apply_dropout(self, i: Array, j: Array, weights: Array) -> Array:
        """Returns `weights` after dropout.

        Args:
          i: the index of the query tile.
          j: the index of the key tile.
          weights: the attention weights of the queries and keys of both tiles, or the gradients of
            these weights; [R, C] or, if `transposed`, [C, R].
        """
        if self.inputs.dropout is None:
            return weights
        row, slot = (jax.lax.rem(place, self.window) for place in (i * self.rows, j * self.columns))
        stays = self.inputs.dropout[pl.ds(row, self.rows), pl.ds(slot, self.columns)]
        return jnp.where((stays.T if self.transposed else stays) != 0, self.scale * weights, 0.0)

    def gradients(
        self, i: Array, j: Array, products: Array, d_weights: Array
    ) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
        """Returns the weights of a query tile and a key tile after dropout, and the gradient of the
        logits of both tiles.

        Args:
          i: the index of the query tile.
          j: the index of the key tile.
          products: the dot products of the queries and keys of both tiles, [R, C] or, if
            `transposed`, [C, R].
          d_weights: the dot products of the queries' output gradients and the values, which are the
            gradients of the weights after dropout, in the same layout.
        """
        lse, along = (
            jnp.expand_dims(x[self.queries(i)], 0 if self.transposed else 1)
            for x in (self.inputs.lse, self.inputs.along)
        )
        weights = jnp.exp2(self.logits(i, j, products) - LOG2E * lse)
        d_weights = self.apply_dropout(i, j, d_weights)
        return self.apply_dropout(i, j, weights), weights * (d_weights - along)


def zero_unless(may_read: Any, x: Array) -> Array:
    """Returns x if `may_read` is True, and zeros otherwise.

    If `may_read` is the Python constant True, the kernel has no code for the selection.
    """
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
    """Writes the output and the log-sum-exp of a tile of queries, computed with a running softmax.

    A program loops over the key tiles in the window. If keys before the document count as zero keys
    (null keys), these keys come first. Their values count as zero, too, so they add only to the sum
    of the weights.

    Args:
      inputs: the arrays of one head and lane.
      y: output, [T, K].
      lse: output, [T].
      rows: R, the number of queries of a tile.
      columns: C, the number of keys of a tile.
      null_keys: True if keys before the document count as zero keys.
      scale: the number by which dropout multiplies the weights that it keeps.
    """
    tiles, i = WindowTiles(inputs, rows, columns, scale), pl.program_id(0)
    own, (begin, end, first) = inputs.q[tiles.queries(i)], tiles.key_tile_range(i)

    def add_null_keys(j: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        """Returns the maximum logits and the sums of weights after key tile j.

        Every key of the tile counts as a zero key. `carry` has the maxima and sums before the tile.
        """
        _, _, top, total = update_softmax(tiles.logits(i, j, jnp.zeros((rows, columns))), *carry)
        return top, total

    def add_key_tile(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        """Returns the weighted sums of values, the maximum logits and the sums of weights after key
        tile j.

        `carry` has the three results as they are before the tile.
        """
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
    if null_keys:
        start = jax.lax.fori_loop(begin, first, add_null_keys, start)
    zeros = jnp.zeros(own.shape, jnp.float32)
    read, top, total = jax.lax.fori_loop(first, end, add_key_tile, (zeros, *start))
    y[tiles.queries(i)] = (read / total[:, None]).astype(y.dtype)
    lse[tiles.queries(i)] = (top + jnp.log2(total)) / LOG2E


def window_attention_queries(
    inputs: WindowTileInputs, d_q: Any, *, rows: int, columns: int, null_keys: bool, scale: float
) -> None:
    """Writes the gradient of a tile of queries.

    Args:
      inputs: the arrays of one head and lane.
      d_q: output, the gradient of the queries [T, K].
      rows: the number of queries of a tile.
      columns: the number of keys of a tile.
      null_keys: not used, because keys of zero contribute nothing to the gradient of queries.
      scale: the number by which dropout multiplies the weights that it keeps.
    """
    del null_keys
    tiles, i = WindowTiles(inputs, rows, columns, scale), pl.program_id(0)
    own, theirs = inputs.q[tiles.queries(i)], inputs.gradient[tiles.queries(i)]
    _, end, first = tiles.key_tile_range(i)

    def add_key_tile(j: Array, total: Array) -> Array:
        """Returns `total`, the gradient of the queries, plus the contribution of key tile j."""
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
    """Writes the gradients of a tile of keys and values.

    The gradients are sums over all queries that may attend to the tile.

    Args:
      inputs: the arrays of one head and lane.
      d_keys, d_values: outputs, the gradients of keys and values, each [Z, K].
      rows: the number of queries of a tile.
      columns: the number of keys of a tile.
      null_keys: not used, because keys that count as zero keys receive no gradient.
      scale: the number by which dropout multiplies the weights that it keeps.
    """
    del null_keys
    tiles, j = WindowTiles(inputs, rows, columns, scale, transposed=True), pl.program_id(0)
    keys, values = (x[tiles.keys(j)] for x in (inputs.keys, inputs.values))

    def add_query_tile(i: Array, totals: tuple[Array, Array]) -> tuple[Array, Array]:
        """Returns `totals`, the gradients of keys and of values, plus the contributions of query
        tile i.
        """
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
    """Writes a sum of gradients of logits, from which the gradient of the bias is computed.

    The sum is over `tiles_per_program` pairs of a query tile and a key tile. The distance between
    the two tiles is the same in all pairs, and so is the bias of each entry of their logits.

    Args:
      inputs: the arrays of one head and lane.
      d_tile: output, the sum [R, C].
      rows: R, the number of queries of a tile.
      columns: C, the number of keys of a tile.
      null_keys: True if keys before the document count as zero keys.
      scale: the number by which dropout multiplies the weights that it keeps.
      tiles_per_program: the number of pairs.
    """
    tiles, distance = WindowTiles(inputs, rows, columns, scale), pl.program_id(0)
    begin = (
        jax.lax.rem(pl.program_id(2), inputs.q.shape[0] // rows // tiles_per_program)
        * tiles_per_program
    )

    def add_query_tile(i: Array, total: Array) -> Array:
        """Returns `total`, a sum of gradients of logits [R, C], plus the gradients of the logits of
        query tile i and of the key tile that is `distance` tiles after the start of the query
        tile's window.
        """
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
