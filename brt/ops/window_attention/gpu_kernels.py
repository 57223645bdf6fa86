"""Bodies of the Triton kernels of window attention; `pallas_gpu` describes the algorithm.

A program sees the arrays of one head and lane (row of the batch) and processes one tile. In shapes,
T is the number of tokens of a segment, W that of a window, Z = W + T, and N the number of blocks.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from brt.ops.softmax import FLOOR

# Logits are multiplied by log2(e), because the hardware computes powers of two.
LOG2E = 1.4426950408889634


class WindowTileInputs(NamedTuple):
    """Arrays of one head and lane, or their block specs; unused arrays are None.

    The fields `gradient`, `lse` and `along` are for the backward pass only.

    Attributes:
      q: [T, K], queries.
      keys, values: [Z, K], with the window before the segment.
      band: float32, the bias times log2(e), the farthest key first, with as many MASKED entries on
        either side as a tile has rows or columns.
      cache_mask: int32 [N], not zero where a block may read the block before it.
      dropout: int8 [W, W], not zero for weights that are kept.
      gradient: [T, K], gradient of the output.
      lse: [T], the log-sum-exp of each query's logits.
      along: [T], the sum of weights times their gradients, which the gradient of the softmax
        subtracts.
    """

    q: Any
    keys: Any
    values: Any
    band: Any
    cache_mask: Any
    dropout: Any = None
    gradient: Any = None
    lse: Any = None
    along: Any = None


class WindowTiles(NamedTuple):
    """The logits of one head and lane, in tiles of R queries and C keys.

    In the methods, i is the index of a query tile and j that of a key tile.

    Attributes:
      inputs: the arrays of one head and lane.
      rows: R.
      columns: C.
      scale: the factor of weights that dropout keeps.
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
        """Returns the slice of query tile i."""
        return pl.ds(i * self.rows, self.rows)

    def keys(self, j: Array) -> Any:
        """Returns the slice of key tile j."""
        return pl.ds(j * self.columns, self.columns)

    def window_of(self, i: Array) -> tuple[Array, ...]:
        """Returns three indices of key tiles for query tile i.

        These are the first tile of its window, the last one (exclusive), and the first one that it
        may read.
        """
        begin = i * self.rows
        block = jax.lax.div(begin, self.window)
        cache_mask = self.inputs.cache_mask[block] > 0
        first = jnp.where(cache_mask, begin, (block + 1) * self.window)
        end = begin + self.window + self.rows
        return tuple(jax.lax.div(place, self.columns) for place in (begin, end, first))

    def readers(self, j: Array) -> tuple[Array, ...]:
        """Returns the indices of the first and the last (exclusive) query tile that may read key
        tile j.
        """
        begin = j * self.columns
        block = jax.lax.div(begin, self.window)
        following = jnp.minimum(block, self.inputs.cache_mask.shape[0] - 1)
        cache_mask = self.inputs.cache_mask[following] > 0
        end = jnp.where(cache_mask, begin + self.columns, block * self.window)
        places = jnp.maximum(begin - self.window, 0), jnp.minimum(end, self.inputs.q.shape[0])
        return tuple(jax.lax.div(place, self.rows) for place in places)

    def logits(self, i: Array, j: Array, products: Array) -> Float[Array, "..."]:
        """Returns the logits of a tile times log2(e), with bias and mask.

        `products` are the products of the tile's queries and keys.
        """
        iota = [jax.lax.broadcasted_iota(jnp.int32, products.shape, axis) for axis in (0, 1)]
        row, column = reversed(iota) if self.transposed else iota
        nearest = max(self.rows, self.columns) - 1 + j * self.columns - i * self.rows
        return LOG2E * products + self.inputs.band[nearest + column - row]

    def apply_dropout(self, i: Array, j: Array, weights: Array) -> Array:
        """Returns weights, or their gradients, of a tile after dropout."""
        if self.inputs.dropout is None:
            return weights
        row, slot = (jax.lax.rem(place, self.window) for place in (i * self.rows, j * self.columns))
        stays = self.inputs.dropout[pl.ds(row, self.rows), pl.ds(slot, self.columns)]
        return jnp.where((stays.T if self.transposed else stays) != 0, self.scale * weights, 0.0)

    def gradients(
        self, i: Array, j: Array, products: Array, d_weights: Array
    ) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
        """Returns the weights of a tile after dropout, and the gradient of its logits.

        Args:
          i: the query tile.
          j: the key tile.
          products: products of queries and keys.
          d_weights: products of the output's gradient and values.
        """
        lse, along = (
            jnp.expand_dims(x[self.queries(i)], 0 if self.transposed else 1)
            for x in (self.inputs.lse, self.inputs.along)
        )
        weights = jnp.exp2(self.logits(i, j, products) - LOG2E * lse)
        d_weights = self.apply_dropout(i, j, d_weights)
        return self.apply_dropout(i, j, weights), weights * (d_weights - along)


def dot_float32(a: Array, b: Array) -> Float[Array, "..."]:
    """Returns the product of two matrices, with float32 sums."""
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def zero_unless(may_read: Any, x: Array) -> Array:
    """Returns x if `may_read` is True, and zeros otherwise; a static True skips the selection."""
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

    Null keys come first. Keys and values are zero, so they only add to the softmax's sum.

    Args:
      inputs: the arrays of one head and lane.
      y: output, [T, K].
      lse: output, [T].
      rows: R, the number of queries of a tile.
      columns: C, the number of keys of a tile.
      null_keys: True if unreadable keys count as zero keys.
      scale: the factor of weights that dropout keeps.
    """
    tiles, i = WindowTiles(inputs, rows, columns, scale), pl.program_id(0)
    own, (begin, end, first) = inputs.q[tiles.queries(i)], tiles.window_of(i)

    def update_softmax(
        logits: Array, top: Array, total: Array
    ) -> tuple[Array, Array, Array, Array]:
        """Returns the weights of a tile, the factor of earlier sums, the new maxima and the new
        sums.
        """
        higher = jnp.maximum(top, jnp.max(logits, axis=1))
        weights, shrunk = jnp.exp2(logits - higher[:, None]), jnp.exp2(top - higher)
        return weights, shrunk, higher, total * shrunk + jnp.sum(weights, axis=1)

    def add_null_keys(j: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        """Returns the maximum and the sum after key tile j, whose keys are zero."""
        _, _, top, total = update_softmax(tiles.logits(i, j, jnp.zeros((rows, columns))), *carry)
        return top, total

    def add_key_tile(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        """Returns the weighted sum of values, the maximum and the sum of weights
        after key tile j.
        """
        read, top, total = carry
        keys, values = (x[tiles.keys(j)] for x in (inputs.keys, inputs.values))
        weights, shrunk, top, total = update_softmax(
            tiles.logits(i, j, dot_float32(own, keys.T)), top, total
        )
        kept = tiles.apply_dropout(i, j, weights).astype(values.dtype)
        return read * shrunk[:, None] + dot_float32(kept, values), top, total

    # The running softmax starts with the virtual logit `softmax.FLOOR`, which takes all the weight
    # of rows without visible keys.
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
    """Writes the gradient of a tile of queries, to which null keys contribute nothing.

    `d_q` [T, K] is the output; the other arguments are those of `window_attention_forward`.
    """
    del null_keys
    tiles, i = WindowTiles(inputs, rows, columns, scale), pl.program_id(0)
    own, theirs = inputs.q[tiles.queries(i)], inputs.gradient[tiles.queries(i)]
    _, end, first = tiles.window_of(i)

    def add_key_tile(j: Array, total: Array) -> Array:
        """Returns the gradient of the queries after key tile j."""
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
    """Writes the gradients of a tile of keys and values, from all queries that may read it.

    `d_keys` and `d_values` [Z, K] are the outputs; the other arguments are those of
    `window_attention_forward`.
    """
    del null_keys
    tiles, j = WindowTiles(inputs, rows, columns, scale, transposed=True), pl.program_id(0)
    keys, values = (x[tiles.keys(j)] for x in (inputs.keys, inputs.values))

    def add_query_tile(i: Array, totals: tuple[Array, Array]) -> tuple[Array, Array]:
        """Returns the gradients of keys and values after query tile i."""
        q, gradient = (x[tiles.queries(i)] for x in (inputs.q, inputs.gradient))
        pair = dot_float32(keys, q.T), dot_float32(values, gradient.T)
        kept, d_logits = tiles.gradients(i, j, *pair)
        keys_total = totals[0] + dot_float32(d_logits.astype(q.dtype), q)
        return keys_total, totals[1] + dot_float32(kept.astype(gradient.dtype), gradient)

    (begin, end), zeros = tiles.readers(j), jnp.zeros(keys.shape, jnp.float32)
    keys_total, values_total = jax.lax.fori_loop(begin, end, add_query_tile, (zeros, zeros))
    d_keys[tiles.keys(j)] = keys_total.astype(d_keys.dtype)
    d_values[tiles.keys(j)] = values_total.astype(d_values.dtype)


def window_attention_band(
    inputs: WindowTileInputs, d_tile: Any, *,
    rows: int, columns: int, null_keys: bool, scale: float, walk: int,
) -> None:  # fmt: skip
    """Writes the gradient of the logits at one distance of tiles, summed over `walk` tiles of
    queries.

    The gradient of the bias follows from these sums. `d_tile` [R, C] is the output; the other
    arguments are those of `window_attention_forward`.
    """
    tiles, distance = WindowTiles(inputs, rows, columns, scale), pl.program_id(0)
    begin = jax.lax.rem(pl.program_id(2), inputs.q.shape[0] // rows // walk) * walk

    def add_query_tile(i: Array, total: Array) -> Array:
        """Returns the sum after query tile i."""
        farthest, _, first = tiles.window_of(i)
        j = farthest + distance
        pair = (
            dot_float32(inputs.q[tiles.queries(i)], inputs.keys[tiles.keys(j)].T),
            dot_float32(inputs.gradient[tiles.queries(i)], inputs.values[tiles.keys(j)].T),
        )
        # Unreadable keys and values are zeros if they count as null keys.
        if null_keys:
            pair = zero_unless(j >= first, pair[0]), zero_unless(j >= first, pair[1])
        _, d_logits = tiles.gradients(i, j, *pair)
        return total + (d_logits if null_keys else zero_unless(j >= first, d_logits))

    zeros = jnp.zeros((rows, columns), jnp.float32)
    d_tile[...] = jax.lax.fori_loop(begin, begin + walk, add_query_tile, zeros)
