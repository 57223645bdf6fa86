"""Bodies of the Triton kernels of masked attention; `pallas_gpu` describes the algorithm.

A program sees the arrays of one head and computes the results of one tile of queries or of keys, in
a loop over tiles. `launch` has the sizes of the tiles, and `rate` is that of dropout. In shapes, Q
is the number of queries, S of keys, and R of queries and C of keys of a tile.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from brt.ops import dropout_hash
from brt.ops.gpu import LOG2E, LaunchShape, dot_float32, update_softmax
from brt.ops.softmax import FLOOR

# The logit of a hidden key, times log2(e). It is finite, because the difference of two infinite
# numbers is not a number, and so far below FLOOR that the weight is zero.
_HIDDEN = -1e30


class MaskedTileInputs(NamedTuple):
    """Input arrays of a kernel for one head, or their block specs; unused arrays are None.

    All arrays except the bias are those of one row of the batch, or, in the kernel for the gradient
    of the bias, those of all rows, with a first axis B.
    """

    q: Any  # The queries [Q, K].
    keys: Any  # The keys [S, K].
    values: Any  # The values [S, K].
    bias: Any  # The bias, float32 [Q, S].
    # Not zero where a query sees a key, int8 [Q, S], or [1, S] if all queries see the same keys.
    # None if `spans` tells which keys a query sees.
    mask: Any
    # The first key that each query sees, and the key after the last one, int32 [2, Q].
    spans: Any = None
    # The two words with which dropout of a query's weights is hashed (`dropout_hash.draw_words`),
    # int32 [2, Q]; None for no dropout.
    draws: Any = None
    # The following fields are for the backward pass only.
    gradient: Any = None  # The gradient of the output [Q, K].
    lse: Any = None  # The log-sum-exp of each query's logits, float32 [Q].
    # For each query, the sum over the keys of the weight times the weight's gradient, minus the
    # gradient of the log-sum-exp, float32 [Q].
    along: Any = None


class MaskedTiles(NamedTuple):
    """The logits of one head and of one row of the batch, in tiles.

    In the methods, i is the index of a tile of queries and j the index of a tile of keys.
    """

    inputs: MaskedTileInputs
    launch: LaunchShape
    rate: float
    head: Any  # The index of the head.
    # The index of the row of the batch; () if the arrays are those of one row.
    row: tuple[Any, ...] = ()
    # True if the axes of logits and weights are [C, R] instead of [R, C], as in the kernel that
    # computes the gradients of a tile of keys.
    transposed: bool = False

    def queries(self, x: Any, i: Any) -> Array:
        return x[(*self.row, pl.ds(i * self.launch.rows, self.launch.rows))]

    def keys(self, x: Any, j: Any) -> Array:
        return x[(*self.row, pl.ds(j * self.launch.columns, self.launch.columns))]

    def _oriented(self, x: Array) -> Array:
        return x.T if self.transposed else x

    def logits(self, i: Any, j: Any, products: Array) -> Float[Array, "..."]:
        """Returns the logits, with bias and mask, times log2(e), in the layout of `products`."""
        rows, columns = self.launch.rows, self.launch.columns
        own, theirs = pl.ds(i * rows, rows), pl.ds(j * columns, columns)
        if self.inputs.bias is not None:
            products += self._oriented(self.inputs.bias[own, theirs])
        if self.inputs.mask is None:
            first, end = self._by_query(self.inputs.spans, i)
            place = self._places(j)
            seen = (first <= place) & (place < end)
        else:
            shared = self.inputs.mask.shape[-2] == 1
            mask = self.inputs.mask[(*self.row, pl.ds(0, 1) if shared else own, theirs)]
            seen = self._oriented(mask) != 0
        return jnp.where(seen, LOG2E * products, _HIDDEN)

    # Returns the two numbers that x [2, Q] has for each query of a tile, each with the axes of the
    # tile's logits.
    def _by_query(self, x: Any, i: Any) -> tuple[Array, Array]:
        rows = pl.ds(i * self.launch.rows, self.launch.rows)
        axis = 0 if self.transposed else 1
        first, second = (jnp.expand_dims(x[(*self.row, n, rows)], axis) for n in (0, 1))
        return first, second

    def _places(self, j: Any) -> Array:
        columns = self.launch.columns
        own = j * columns + jnp.arange(columns, dtype=jnp.int32)
        return jnp.expand_dims(own, 1 if self.transposed else 0)

    def apply_dropout(self, i: Any, j: Any, weights: Array) -> Array:
        """Applies dropout to the weights of two tiles, or to gradients of these weights."""
        if self.inputs.draws is None:
            return weights
        first, second = self._by_query(self.inputs.draws, i)
        place = self.head * self.inputs.keys.shape[-2] + self._places(j)
        keep = dropout_hash.kept(place, first, second, self.rate)
        return jnp.where(keep, weights * (1 / (1 - self.rate)), 0.0)

    def gradients(
        self, i: Any, j: Any, products: Array, d_kept: Array
    ) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
        """Returns the weights of two tiles after dropout, and the gradient of their logits.

        `products` are the dot products of queries and keys. `d_kept` are those of the gradients of
        the outputs and the values, which are the gradients of the weights after dropout.
        """
        lse, along = (
            jnp.expand_dims(self.queries(x, i), 0 if self.transposed else 1)
            for x in (self.inputs.lse, self.inputs.along)
        )
        weights = jnp.exp2(self.logits(i, j, products) - LOG2E * lse)
        d_weights = self.apply_dropout(i, j, d_kept)
        return self.apply_dropout(i, j, weights), weights * (d_weights - along)


def masked_attention_forward(
    inputs: MaskedTileInputs, y: Any, lse: Any, *, launch: LaunchShape, rate: float
) -> None:
    """Writes a tile of the output y [Q, K] and of its log-sum-exp, with a running softmax.

    The softmax starts with an additional logit, `softmax.FLOOR`, which belongs to no key. For a
    query that sees no key, this logit has all the weight, so that the output is zero. For other
    queries its weight is zero, because FLOOR is far below the logits of visible keys.
    """
    i, head = pl.program_id(0), pl.program_id(2)
    tiles = MaskedTiles(inputs, launch, rate, head)
    own = tiles.queries(inputs.q, i)

    def add_key_tile(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        # These are the weighted sums of values, the maximum logits, and the sums of weights.
        read, top, total = carry
        keys, values = tiles.keys(inputs.keys, j), tiles.keys(inputs.values, j)
        logits = tiles.logits(i, j, dot_float32(own, keys.T))
        weights, shrunk, top, total = update_softmax(logits, top, total)
        kept = tiles.apply_dropout(i, j, weights).astype(values.dtype)
        return read * shrunk[:, None] + dot_float32(kept, values), top, total

    floor = jnp.full(launch.rows, LOG2E * FLOOR), jnp.ones(launch.rows)
    start = jnp.zeros(own.shape, jnp.float32), *floor
    count = inputs.keys.shape[0] // launch.columns
    read, top, total = jax.lax.fori_loop(0, count, add_key_tile, start)
    place = pl.ds(i * launch.rows, launch.rows)
    y[place] = (read / total[:, None]).astype(y.dtype)
    lse[place] = (top + jnp.log2(total)) / LOG2E


def masked_attention_queries(
    inputs: MaskedTileInputs, d_q: Any, *, launch: LaunchShape, rate: float
) -> None:
    """Writes a tile of d_q [Q, K], the gradient of the queries."""
    i, head = pl.program_id(0), pl.program_id(2)
    tiles = MaskedTiles(inputs, launch, rate, head)
    own, gradient = tiles.queries(inputs.q, i), tiles.queries(inputs.gradient, i)

    def add_key_tile(j: Array, total: Array) -> Array:
        keys, values = tiles.keys(inputs.keys, j), tiles.keys(inputs.values, j)
        pair = dot_float32(own, keys.T), dot_float32(gradient, values.T)
        _, d_logits = tiles.gradients(i, j, *pair)
        return total + dot_float32(d_logits.astype(keys.dtype), keys)

    count = inputs.keys.shape[0] // launch.columns
    total = jax.lax.fori_loop(0, count, add_key_tile, jnp.zeros(own.shape, jnp.float32))
    d_q[pl.ds(i * launch.rows, launch.rows)] = total.astype(d_q.dtype)


def masked_attention_keys(
    inputs: MaskedTileInputs, d_keys: Any, d_values: Any, *, launch: LaunchShape, rate: float
) -> None:
    """Writes a tile of d_keys and d_values [S, K], the gradients of keys and values."""
    j, head = pl.program_id(0), pl.program_id(2)
    tiles = MaskedTiles(inputs, launch, rate, head, transposed=True)
    keys, values = tiles.keys(inputs.keys, j), tiles.keys(inputs.values, j)

    def add_query_tile(i: Array, totals: tuple[Array, Array]) -> tuple[Array, Array]:
        q, gradient = tiles.queries(inputs.q, i), tiles.queries(inputs.gradient, i)
        pair = dot_float32(keys, q.T), dot_float32(values, gradient.T)
        kept, d_logits = tiles.gradients(i, j, *pair)
        keys_total = totals[0] + dot_float32(d_logits.astype(q.dtype), q)
        return keys_total, totals[1] + dot_float32(kept.astype(gradient.dtype), gradient)

    zeros, count = jnp.zeros(keys.shape, jnp.float32), inputs.q.shape[0] // launch.rows
    keys_total, values_total = jax.lax.fori_loop(0, count, add_query_tile, (zeros, zeros))
    own = pl.ds(j * launch.columns, launch.columns)
    d_keys[own] = keys_total.astype(d_keys.dtype)
    d_values[own] = values_total.astype(d_values.dtype)


def masked_attention_bias(
    inputs: MaskedTileInputs, d_bias: Any, *, launch: LaunchShape, rate: float
) -> None:
    """Writes a tile of d_bias [Q, S], the bias's gradient, summed over the rows of the batch."""
    i, j, head = (pl.program_id(axis) for axis in range(3))

    def add_row(row: Array, total: Array) -> Array:
        tiles = MaskedTiles(inputs, launch, rate, head, (row,))
        q, gradient = tiles.queries(inputs.q, i), tiles.queries(inputs.gradient, i)
        keys, values = tiles.keys(inputs.keys, j), tiles.keys(inputs.values, j)
        pair = dot_float32(q, keys.T), dot_float32(gradient, values.T)
        return total + tiles.gradients(i, j, *pair)[1]

    zeros = jnp.zeros((launch.rows, launch.columns), jnp.float32)
    total = jax.lax.fori_loop(0, inputs.q.shape[0], add_row, zeros)
    own, theirs = pl.ds(i * launch.rows, launch.rows), pl.ds(j * launch.columns, launch.columns)
    d_bias[own, theirs] = total
