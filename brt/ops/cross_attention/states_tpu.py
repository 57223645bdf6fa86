"""The output of the recurrence on TPUs: every query is multiplied with the state of its segment.

A step of the grid handles one source and a group of heads, which fill the 128 lanes of a register.
It multiplies the queries with the states of all segments. For the product with the state of a
segment, the queries of all other segments are set to zero. The queries of a group of two heads of
size 64 are multiplied with a block-diagonal matrix. Queries and outputs therefore have the layout
that the projections write and read, and are not copied. The states are read as
`pallas_tpu.recurrence` writes them.

In shapes, B is the number of sources, T the number of queries of a source, and M the number of
segments. H heads of size K form N groups. P is the total width of the heads of a group, 128 on
TPUs. The matrices K x K of these heads lie side by side as one matrix K x P.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from brt.distributed import rules
from brt.ops import dispatch
from brt.ops.tpu import LANES, NN, NT, TN, dot_float32, parallel_heads, unrolled_loop

Interpret = bool | pltpu.InterpretParams
# A step of the grid has all queries of a source. This many queries fit into VMEM on all chips. The
# states always fit, because they take less memory than the arrays of `pallas_tpu.recurrence`, which
# computes them.
MOST_QUERIES = 2048


def read_states(
    queries: Float[Array, "B T H K"],
    states: Float[Array, "M B H K K"],
    segment: Int[Array, "B T"],
    *,
    interpret: Interpret = False,
) -> Float[Array, "B T H K"]:
    """Returns the product of each query and the state of its segment."""
    local: Any = functools.partial(_local, interpret=interpret)
    if rules.partitioned():
        by_head = rules.partition_spec("lanes", None, "heads", None, shape=queries.shape)
        of_states = P(None, by_head[0], by_head[2], None, None)
        local = dispatch.on_devices(local, (by_head, of_states, P(by_head[0])), by_head)
    return local(queries, states, segment)


interpreted = functools.partial(read_states, interpret=True)


def _local(queries: Array, states: Array, segment: Array, *, interpret: Interpret) -> Array:
    batch, length, heads, width = queries.shape
    together = math.gcd(heads, max(LANES // width, 1))
    grouped = states.reshape(len(states), batch, -1, together, width, width)
    grouped = grouped.transpose(1, 2, 0, 4, 3, 5)
    grouped = grouped.reshape(*grouped.shape[:4], together * width)
    q = queries.reshape(batch, length, heads * width)
    return _products(q, grouped, segment[:, :, None], interpret).reshape(queries.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _products(
    queries: Float[Array, "B T HK"],
    states: Float[Array, "B N M K P"],
    segment: Int[Array, "B T 1"],
    interpret: Interpret,
) -> Float[Array, "B T HK"]:
    return _forward(queries, states, segment, interpret)[0]


def _forward(
    queries: Array, states: Array, segment: Array, interpret: Interpret
) -> tuple[Array, tuple]:
    tokens, of_segment, of_states, options = _call("segment_states", queries, states, interpret)
    (y,) = pl.pallas_call(
        _forward_kernel, in_specs=[tokens, of_states, of_segment], out_specs=[tokens],
        out_shape=[jax.ShapeDtypeStruct(queries.shape, queries.dtype)], **options,
    )(queries, states, segment)  # fmt: skip
    return y, (queries, states, segment)


def _backward(interpret: Interpret, residuals: tuple, gradient: Array) -> tuple:
    queries, states, segment = residuals
    tokens, of_segment, of_states, options = _call(
        "segment_states_backward", queries, states, interpret
    )
    d_queries, d_states = pl.pallas_call(
        _backward_kernel,
        in_specs=[tokens, of_states, of_segment, tokens],
        out_specs=[tokens, of_states],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (queries, states)],
        **options,
    )(queries, states, segment, gradient)
    return d_queries, d_states, None


_products.defvjp(_forward, _backward)


def _call(
    name: str, queries: Array, states: Array, interpret: Interpret
) -> tuple[pl.BlockSpec, pl.BlockSpec, pl.BlockSpec, dict[str, Any]]:
    """Returns three block specs and the other options of a call.

    The block specs are those of the queries (and outputs), of the segment indices of the queries,
    and of the states. `brt.planning.kernel_cycles` reads the kernel's kind, the sizes and the
    number of grid steps from the kernel's name.
    """
    (batch, length, _), (_, groups, count, width, wide) = queries.shape, states.shape
    products = 2 if "backward" in name else 1
    return (
        pl.BlockSpec((None, length, wide), lambda p, b: (b, 0, p)),
        pl.BlockSpec((None, length, 1), lambda p, b: (b, 0, 0)),
        pl.BlockSpec((None, None, count, width, wide), lambda p, b: (b, p, 0, 0, 0)),
        {
            "grid": (groups, batch),
            "name": f"{name}_{count}x{length}x{wide}_{queries.dtype}_{groups * batch}_steps",
            "interpret": interpret,
            "compiler_params": parallel_heads(2),
            "cost_estimate": pl.CostEstimate(
                flops=2 * products * queries.size * width, transcendentals=0,
                bytes_accessed=2 * products * (queries.size + states.size) * queries.dtype.itemsize,
            ),
        },
    )  # fmt: skip


def _only(x: Float[Array, "T P"], segment: Int[Array, "T 1"], j: Any) -> Float[Array, "T P"]:
    return jnp.where(segment == j, x, jnp.zeros_like(x))


def _is_own(height: int, width: int, wide: int) -> Array:
    """Returns True where the row and the column of a block-diagonal matrix have the same head."""
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (height, wide), axis) for axis in (0, 1))
    return jax.lax.div(row, jnp.int32(width)) == jax.lax.div(column, jnp.int32(width))


def _block_diagonal(state: Float[Array, "K P"]) -> Float[Array, "P P"]:
    """Returns the block-diagonal matrix of the matrices K x K in `state`, one per head."""
    width, wide = state.shape
    if width == wide:
        return state
    tall = jnp.concatenate([state] * (wide // width), axis=0)
    return jnp.where(_is_own(wide, width, wide), tall, jnp.zeros_like(tall))


def _blocks(x: Float[Array, "P P"], width: int) -> Float[Array, "K P"]:
    """Returns the blocks on the diagonal of x side by side; the inverse of `_block_diagonal`."""
    wide = x.shape[1]
    if width == wide:
        return x
    x = jnp.where(_is_own(wide, width, wide), x, jnp.zeros_like(x))
    return sum(x[i : i + width] for i in range(width, wide, width)) + x[:width]


def _forward_kernel(queries: Any, states: Any, segment: Any, y: Any) -> None:
    """Writes the products [T, P] of the queries of a step to y; `states` is [M, K, P]."""
    q, own = queries[...], segment[...]

    def add_segment(j: Any, total: Array) -> Array:
        return total + dot_float32(_only(q, own, j), _block_diagonal(states[j]), NN)

    total = unrolled_loop(states.shape[0], add_segment, jnp.zeros(q.shape, jnp.float32))
    y[...] = total.astype(y.dtype)


def _backward_kernel(
    queries: Any, states: Any, segment: Any, gradient: Any, d_queries: Any, d_states: Any
) -> None:
    q, own, dy = queries[...], segment[...], gradient[...]

    def add_segment(j: Any, total: Array) -> Array:
        own_dy = _only(dy, own, j)
        products = dot_float32(q, own_dy, TN)
        d_states[j] = _blocks(products, states.shape[1]).astype(d_states.dtype)
        return total + dot_float32(own_dy, _block_diagonal(states[j]), NT)

    total = unrolled_loop(states.shape[0], add_segment, jnp.zeros(q.shape, jnp.float32))
    d_queries[...] = total.astype(d_queries.dtype)
