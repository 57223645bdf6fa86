"""Bodies of the Triton kernels of softmax attention; `pallas_gpu` describes the algorithm.

A program sees the arrays of one head and of one block of a row of the batch, and computes the
results of one tile of queries or of keys. `launch` has the sizes of the tiles. In shapes, Q is the
number of queries of the block, and S of its keys.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from brt.ops.gpu import LOG2E, LaunchShape, dot_float32, update_softmax


class SoftmaxTileInputs(NamedTuple):
    """Arrays of a kernel for one head and block, or their block specs; None if not needed."""

    q: Any  # The queries [Q, K].
    keys: Any  # The keys [S, K].
    values: Any  # The values [S, K].
    # One if the queries may not read the first half of the keys, else zero, int32 [1]; None if they
    # may read all keys.
    hides: Any = None
    # The following fields are for the backward pass only.
    gradient: Any = None  # The gradient of the output [Q, K].
    lse: Any = None  # The log-sum-exp of each query's logits, times log2(e) [Q].
    # For each query, the sum over the keys of the weight times the weight's gradient [Q].
    along: Any = None

    def hidden(self, size: int = 1) -> Any:
        """Returns how many tiles of `size` keys at the start the queries may not read."""
        return 0 if self.hides is None else self.hides[0] * (self.keys.shape[0] // 2 // size)


def tile_slice(index: Any, size: int) -> Any:
    return pl.ds(index * size, size)


def softmax_attention_forward(
    inputs: SoftmaxTileInputs, y: Any, lse: Any, *, launch: LaunchShape, null_keys: bool
) -> None:
    """Writes a tile of the output y [Q, K], and of the log-sum-exp [Q] times log2(e).

    With null keys, hidden keys count as zero keys with zero values. Their logits are zero, so the
    running softmax starts with the maximum 0 and with a sum of as many ones.
    """
    rows, columns = launch.rows, launch.columns
    own = tile_slice(pl.program_id(0), rows)
    q = inputs.q[own]

    def add_key_tile(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        # These are the weighted sums of values, the maximum logits, and the sums of weights.
        read, top, total = carry
        keys, values = (x[tile_slice(j, columns)] for x in (inputs.keys, inputs.values))
        logits = LOG2E * dot_float32(q, keys.T)
        weights, shrunk, top, total = update_softmax(logits, top, total)
        return (
            read * shrunk[:, None] + dot_float32(weights.astype(values.dtype), values),
            top,
            total,
        )

    top, total = jnp.full(rows, -jnp.inf), jnp.zeros(rows)
    if null_keys:
        hidden = inputs.hidden()
        top = jnp.where(hidden > 0, jnp.zeros(rows), top)
        total = total + hidden.astype(jnp.float32)
    start = jnp.zeros(q.shape, jnp.float32), top, total
    first, end = inputs.hidden(columns), inputs.keys.shape[0] // columns
    read, top, total = jax.lax.fori_loop(first, end, add_key_tile, start)
    y[own] = (read / total[:, None]).astype(y.dtype)
    lse[own] = top + jnp.log2(total)


def softmax_attention_queries(inputs: SoftmaxTileInputs, d_q: Any, *, launch: LaunchShape) -> None:
    """Writes a tile of d_q [Q, K], the gradient of the queries."""
    rows, columns = launch.rows, launch.columns
    own = tile_slice(pl.program_id(0), rows)
    q, gradient, lse, along = (
        x[own] for x in (inputs.q, inputs.gradient, inputs.lse, inputs.along)
    )

    def add_key_tile(j: Array, total: Array) -> Array:
        keys, values = (x[tile_slice(j, columns)] for x in (inputs.keys, inputs.values))
        weights = jnp.exp2(LOG2E * dot_float32(q, keys.T) - lse[:, None])
        d_logits = weights * (dot_float32(gradient, values.T) - along[:, None])
        return total + dot_float32(d_logits.astype(keys.dtype), keys)

    first, end = inputs.hidden(columns), inputs.keys.shape[0] // columns
    total = jax.lax.fori_loop(first, end, add_key_tile, jnp.zeros(q.shape, jnp.float32))
    d_q[own] = total.astype(d_q.dtype)


def softmax_attention_keys(
    inputs: SoftmaxTileInputs, d_keys: Any, d_values: Any, *, launch: LaunchShape
) -> None:
    """Writes a tile of d_keys and d_values [S, K], which are zero for hidden keys.

    The matrices of logits and weights are transposed, keys x queries.
    """
    rows, columns = launch.rows, launch.columns
    j = pl.program_id(0)
    own = tile_slice(j, columns)
    keys, values = inputs.keys[own], inputs.values[own]

    def add_query_tile(i: Array, totals: tuple[Array, Array]) -> tuple[Array, Array]:
        q, gradient, lse, along = (
            x[tile_slice(i, rows)] for x in (inputs.q, inputs.gradient, inputs.lse, inputs.along)
        )
        weights = jnp.exp2(LOG2E * dot_float32(keys, q.T) - lse[None])
        d_logits = weights * (dot_float32(values, gradient.T) - along[None])
        d_values = totals[1] + dot_float32(weights.astype(gradient.dtype), gradient)
        return totals[0] + dot_float32(d_logits.astype(q.dtype), q), d_values

    end = (j >= inputs.hidden(columns)).astype(jnp.int32) * (inputs.q.shape[0] // rows)
    zeros = jnp.zeros(keys.shape, jnp.float32)
    keys_total, values_total = jax.lax.fori_loop(0, end, add_query_tile, (zeros, zeros))
    d_keys[own] = keys_total.astype(d_keys.dtype)
    d_values[own] = values_total.astype(d_values.dtype)
