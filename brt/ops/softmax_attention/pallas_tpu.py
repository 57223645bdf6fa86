"""Softmax attention over all keys on TPUs: logits and weights stay in VMEM.

The grid is (head, row of the batch, block). A step of the grid has the queries and keys of one
block, and computes the queries in tiles. Logits and weights are matrices of keys x queries, and the
backward pass recomputes the weights from the log-sum-exp. In shapes, S is the number of keys of a
block, and R of queries of a tile. In `rows`, rows are queries.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from brt.ops.dispatch import bits_dtype, from_bits, input_residual, output_residual, to_bits
from brt.ops.softmax import MASKED
from brt.ops.tpu import (
    LANES,
    NN,
    NT,
    TN,
    dot_float32,
    head_refusal,
    l2_normalize_rows,
    l2_normalize_rows_backward,
    parallel_heads,
    tokens_first,
    vmem_refusal,
)

# The kernels accept blocks of at most this many keys, and at most as many queries, because the
# logits of a tile of queries (rows) and all keys must fit into VMEM.
_MAX_SLOTS = 2048
# A tile has at most this many queries. With this number, the compiler's schedules are shortest.
_ROWS = 256
# A tile has at most this many logits, because the backward kernel needs VMEM for five float32
# arrays of the size of a tile's logits.
_TILE = 1024 * _ROWS


def refusal(q: Array, k: Array, v: Array, cache_mask: Array | None = None, **_: Any) -> str | None:
    blocks = 1 if k.ndim == q.ndim else k.shape[1]
    queries, keys, width = q.shape[1] // blocks, k.shape[-2], q.shape[3]
    # If there is a `cache_mask`, the keys belong to two blocks, each with a multiple of 128 keys.
    key_multiple = 128 if cache_mask is None else 256
    if queries % 128 or keys % key_multiple or max(queries, keys) > _MAX_SLOTS:
        return (
            f"takes a multiple of 128 queries and of {key_multiple} keys, at most {_MAX_SLOTS}, "
            f"not {queries} and {keys}"
        )
    if reason := head_refusal(width, q.dtype):
        return reason
    return vmem_refusal(_vmem_bytes(queries, keys, max(width, LANES), q.dtype.itemsize))


def _vmem_bytes(queries: int, keys: int, width: int, itemsize: int) -> int:
    """Returns the bytes of VMEM that the larger of both passes needs.

    Both have two buffers for each block and arrays of the size of a tile's logits. The forward pass
    also keeps the weights of all tiles, and the backward pass the sums.
    """
    buffer, tile = 2 * width * itemsize, keys * _tile_rows(queries, keys) * 4
    forward = buffer * 2 * (queries + keys) + queries * keys * itemsize + 3 * tile
    backward = buffer * (3 * queries + 4 * keys) + 2 * keys * width * 4 + 5 * tile
    return max(forward, backward)


def _tile_rows(queries: int, keys: int) -> int:
    return math.gcd(queries, max(LANES, min(_ROWS, _TILE // keys)))


def attention(
    queries: Float[Array, "B T H K"],
    k: Float[Array, "B *N H S K"],
    v: Float[Array, "B *N H S K"],
    cache_mask: Bool[Array, " B"] | None,
    *,
    null_keys: bool,
    scale: Float[Array, " H"] | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "B T H K"]:
    """Implements `api.attend` and `api.attend_to_blocks`, with heads before tokens in k and v.

    *N is an optional axis of blocks. If `cache_mask` is None, all queries may read all keys of
    their block. `interpret` runs the kernels on any device and with any sizes, slowly.
    """
    settings = _Settings(cache_mask is not None, null_keys, interpret)
    if cache_mask is None:
        cache_mask = jnp.ones(queries.shape[:1], bool)
    k, v = (x.reshape(-1, *x.shape[-3:]) for x in (k, v))
    arguments = _Arguments(queries.swapaxes(1, 2), k, v, cache_mask.astype(jnp.int32), scale)
    return _attend(arguments, settings)


interpreted = functools.partial(attention, interpret=True)


class _Settings(NamedTuple):
    masks: bool  # True if there is a mask that may hide the first half of the keys.
    null_keys: bool  # True if hidden keys count as zero keys with zero values.
    interpret: bool | pltpu.InterpretParams


class _Arguments(NamedTuple):
    q: Float[Array, "B H T K"]
    # The first axis of `k` and `v` has the blocks of all rows of the batch, row after row.
    k: Float[Array, "X H S K"]
    v: Float[Array, "X H S K"]
    cache_mask: Int[Array, " B"]
    # The kernel scales each head's queries to the norm `scale`; None means no normalization.
    scale: Float[Array, " H"] | None

    @property
    def blocks(self) -> int:
        """The number of blocks of a row of the batch."""
        return len(self.k) // len(self.q)

    @property
    def queries(self) -> int:
        """The number of queries of a block."""
        return self.q.shape[2] // self.blocks

    def lse_shape(self) -> tuple[int, ...]:
        """Returns the shape of numbers per query: [B, H, blocks, 1, queries of a block]."""
        return *self.q.shape[:2], self.blocks, 1, self.queries

    def query_norms(self) -> Float[Array, "H 1 L"] | None:
        """Returns `scale`, repeated over the width L = 128 of a vector register."""
        if self.scale is None:
            return None
        wide = self.scale.astype(jnp.float32)[:, None, None]
        return jnp.broadcast_to(wide, (len(self.scale), 1, LANES))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _attend(arguments: _Arguments, settings: _Settings) -> Float[Array, "B T H K"]:
    return _forward(arguments, settings)[0]


def _forward(arguments: _Arguments, settings: _Settings) -> tuple[Array, tuple]:
    q = arguments.q
    q_spec, k_spec, lse_spec, length = _specs(arguments)
    y, lse = _call(
        _forward_kernel, arguments, settings, [q_spec, k_spec, k_spec, length], [q_spec, lse_spec],
        [
            jax.ShapeDtypeStruct(q.shape, bits_dtype(q.dtype)),
            jax.ShapeDtypeStruct(arguments.lse_shape(), jnp.uint32),
        ],
        products=2,
    )(arguments.cache_mask, *arguments[:3], arguments.query_norms())  # fmt: skip
    y, lse = output_residual(y, q.dtype), output_residual(lse, lse.dtype)
    # If the kernel normalizes the queries, the backward pass reads the queries as they were before
    # normalization. `input_residual` lets a rematerialized layer save these queries.
    if arguments.scale is not None:
        arguments = arguments._replace(q=input_residual(q))
    return tokens_first(y), (arguments, y, lse)


def _backward(settings: _Settings, residuals: tuple, gradient: Array) -> tuple[_Arguments]:
    (arguments, y, lse), gradient = residuals, gradient.swapaxes(1, 2)
    along = jnp.sum(gradient.astype(jnp.float32) * y.astype(jnp.float32), axis=-1)
    along = along.reshape(arguments.lse_shape())
    q_spec, k_spec, lse_spec, length = _specs(arguments)
    query_norms = arguments.query_norms()
    d_q, d_k, d_v, d_scale = _call(
        _backward_kernel,
        arguments,
        settings,
        [q_spec, k_spec, k_spec, length, q_spec, lse_spec, lse_spec],
        [q_spec, k_spec, k_spec, length],
        [*arguments[:3], query_norms],
        products=5,
    )(arguments.cache_mask, *arguments[:3], query_norms, gradient, lse, along)
    if arguments.scale is not None:
        d_scale = d_scale[:, 0, 0].astype(arguments.scale.dtype)
    return (_Arguments(d_q, d_k, d_v, None, d_scale),)


_attend.defvjp(_forward, _backward)


def _specs(arguments: _Arguments) -> tuple[pl.BlockSpec | None, ...]:
    """Returns the block specs of queries, keys, numbers per query, and numbers per head."""
    blocks, queries, width = arguments.blocks, arguments.queries, arguments.q.shape[3]
    row_spec = pl.BlockSpec((None, None, queries, width), lambda h, b, n, _: (b, h, n, 0))
    d_keys = pl.BlockSpec(
        (None, None, *arguments.k.shape[2:]), lambda h, b, n, _: (b * blocks + n, h, 0, 0)
    )
    lse_spec = pl.BlockSpec((None, None, None, 1, queries), lambda h, b, n, _: (b, h, n, 0, 0))
    length = None
    if arguments.scale is not None:
        length = pl.BlockSpec((None, 1, LANES), lambda h, b, n, _: (h, 0, 0))
    return row_spec, d_keys, lse_spec, length


def _call(
    kernel: Any, arguments: _Arguments, settings: _Settings, inputs: list, outputs: list,
    shapes: Sequence[Any], *, products: int,
) -> Any:  # fmt: skip
    """Prepares the call of a kernel with one step per head, row of the batch and block."""
    (batch, heads, _, width), slots = arguments.q.shape, arguments.k.shape[2]
    blocks, queries = arguments.blocks, arguments.queries
    backward = "_backward" if products > 2 else ""
    size = f"{queries}x{slots}x{width}_{arguments.q.dtype}"
    scratch = [pltpu.VMEM((slots, width), jnp.float32)] * 2 if backward else []
    return pl.pallas_call(
        functools.partial(kernel, settings=settings),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(heads, batch, blocks), in_specs=inputs, out_specs=outputs,
            scratch_shapes=scratch,
        ),
        out_shape=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), list(shapes)),
        # The name tells `brt.planning.kernel_cycles` which kernel it is, and how many steps it has.
        name=f"softmax_attention{backward}_{size}_{batch * heads * blocks}_steps",
        interpret=settings.interpret, compiler_params=parallel_heads(3),
        cost_estimate=pl.CostEstimate(
            flops=2 * products * slots * arguments.q.size,
            transcendentals=slots * arguments.q.size // width,
            bytes_accessed=sum(
                x.size * x.dtype.itemsize for x in jax.tree.leaves((arguments[:3], shapes))
            ),
        ),
    )  # fmt: skip


def _row_tiles(queries: int, keys: int) -> list[slice]:
    rows = _tile_rows(queries, keys)
    return [slice(i, i + rows) for i in range(0, queries, rows)]


def _load_keys_values(
    seen: Array, keys: Any, values: Any, settings: _Settings
) -> tuple[Array, Array]:
    """Returns keys and values; hidden keys and values are zeros if `null_keys` is True."""
    if not (settings.masks and settings.null_keys):
        return keys[...], values[...]
    half = keys.shape[0] // 2

    def zero_unreadable(x: Any) -> Array:
        first = jax.lax.select(seen, x[:half], jnp.zeros_like(x[:half]))
        return jnp.concatenate([first, x[half:]], axis=0)

    return zero_unreadable(keys), zero_unreadable(values)


def _logits(seen: Array, keys: Array, own: Array, settings: _Settings) -> Float[Array, "S R"]:
    results = dot_float32(keys, own, NT)
    if not settings.masks or settings.null_keys:
        return results
    half = keys.shape[0] // 2
    return jnp.concatenate([results[:half] + jnp.where(seen, 0.0, MASKED), results[half:]], axis=0)


def _load_queries(q: Any, rows: slice, length: Any) -> Float[Array, "R K"]:
    own = q[rows]
    return own if length is None else (l2_normalize_rows(own)[0] * length[:, :1]).astype(own.dtype)


def _forward_kernel(
    cache_mask: Any, q: Any, k: Any, v: Any, length: Any, y: Any, lse: Any, *, settings: _Settings
) -> None:
    """Writes the output y and the log-sum-exp of a block, as unsigned integers with the same bits.

    `length` is the norm of the queries (`query_norms`), or None.
    """
    seen = cache_mask[pl.program_id(1)] > 0
    keys, values = _load_keys_values(seen, k, v, settings)
    tiles, softmax = _row_tiles(q.shape[0], k.shape[0]), []
    # The weights of all tiles are computed before any sum: the softmax of a tile can then be
    # computed while the matrix units compute the logits of the next tile.
    for rows in tiles:
        logits = _logits(seen, keys, _load_queries(q, rows, length), settings)
        top = jnp.max(logits, axis=0, keepdims=True)
        weights = jnp.exp(logits - top)
        total = jnp.sum(weights, axis=0, keepdims=True)
        softmax.append((weights.astype(v.dtype), top, total))
    columns = values.T
    for rows, (weights, top, total) in zip(tiles, softmax, strict=True):
        sums = dot_float32(columns, weights, NN)
        y[rows] = to_bits((sums / total).T.astype(v.dtype))
        lse[:, rows] = to_bits(top + jnp.log(total))


def _backward_kernel(
    cache_mask: Any, q: Any, k: Any, v: Any, length: Any, gradient: Any, lse: Any, along: Any,
    d_q: Any, d_k: Any, d_v: Any, d_length: Any, keys_sum: Any, values_sum: Any, *,
    settings: _Settings,
) -> None:  # fmt: skip
    """Writes the gradients of a block, and adds to `d_length`, a sum over all steps of a head.

    For each query, `along` is the sum over the keys of the weight times the weight's gradient.
    """
    lane, n = pl.program_id(1), pl.program_id(2)
    seen = cache_mask[lane] > 0
    keys, values = _load_keys_values(seen, k, v, settings)
    if length is not None:

        @pl.when((lane == 0) & (n == 0))
        def _() -> None:
            d_length[...] = jnp.zeros_like(d_length)

    for rows in _row_tiles(q.shape[0], k.shape[0]):
        own, theirs = _load_queries(q, rows, length), gradient[rows]
        weights = jnp.exp(_logits(seen, keys, own, settings) - from_bits(lse[:, rows], jnp.float32))
        d_logits = weights * (dot_float32(values, theirs, NT) - along[:, rows])
        d_logits, weights = d_logits.astype(own.dtype), weights.astype(own.dtype)
        # The schedule is shorter if these products come before the gradient of the queries.
        d_keys, d_values = dot_float32(d_logits, own, NN), dot_float32(weights, theirs, NN)
        if rows.start:
            d_keys, d_values = d_keys + keys_sum[...], d_values + values_sum[...]
        keys_sum[...], values_sum[...] = d_keys, d_values
        d_own = dot_float32(d_logits, keys, TN)
        if length is not None:
            d_own, directed = l2_normalize_rows_backward(q[rows], d_own)
            d_own *= length[:, :1]
            total = jnp.sum(directed, axis=0, keepdims=True)
            d_length[...] += jnp.broadcast_to(total, (1, LANES))
        d_q[rows] = d_own.astype(d_q.dtype)
    for results, total in ((d_k, keys_sum), (d_v, values_sum)):
        if settings.masks and settings.null_keys:
            half = results.shape[0] // 2
            first = total[:half]
            results[:half] = jax.lax.select(seen, first, jnp.zeros_like(first)).astype(
                results.dtype
            )
            results[half:] = total[half:].astype(results.dtype)
        else:
            results[...] = total[...].astype(results.dtype)
