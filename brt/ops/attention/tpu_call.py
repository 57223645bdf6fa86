"""Calls of the attention kernels for TPUs: logits, weights and their gradients stay in VMEM.

The grid is (group of heads, tile of queries, row of the batch, block). A step attends from a tile
of queries to a slab of keys. With a window, the tile is a block of W queries, and the slab has the
keys of this block and of the block before. A sub-tile of r queries then reads W + r keys of the
slab, and all sub-tiles share one bias [W + r, r], because the bias depends only on the distance of
query and key. Without a window, a step reads all keys of its row or block. The grid visits all rows
of the batch for one tile of queries before it goes on to the next tile. A tile of the bias is
therefore read once, and its gradient is added up in VMEM.

The backward pass recomputes the weights from the log-sum-exp. It goes through the blocks of a
segment from the last to the first, because the keys of a block receive gradients from the queries
of the next block. If heads of queries share keys, the kernel writes separate gradients of the keys
for each head of queries, and XLA adds these up.

In shapes, B is the number of rows of the batch, H the number of heads of queries, G the number of
heads of keys, T the number of tokens of a row, L the number of keys of a slab, R the number of
queries of a bias, K the size of a head, and D the number of parts of a segment
(`SlabSettings.part`).
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from brt.ops.attention.tpu_kernels import (
    SlabGradients,
    SlabInputs,
    SlabSettings,
    backward_kernel,
    forward_kernel,
)
from brt.ops.dispatch import bits_dtype, from_bits, input_residual, output_residual
from brt.ops.grouped_heads import summed_over_groups
from brt.ops.tpu import LANES, l2_normalize_rows_backward, parallel_heads, tokens_first


class SlabArguments(NamedTuple):
    """The arrays of a call.

    Queries, keys and values have heads before tokens, [B, H, T, K], or merged heads, [B, T, HK].
    Arrays with merged heads need no copy: the kernel reads them as the projections wrote them.
    """

    q: Float[Array, "B H T K"] | Float[Array, "B T HK"]
    # Without a window, one array of slabs, [B, G, L, K] or [B, L, HK]. With a window, two arrays:
    # the cached block [B, G, W, K] and the segment [B, G, T, K].
    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    bias: Float[Array, "H L R"] | None = None  # `SlabInputs.bias` of all heads and queries
    mask: Array | None = None  # `SlabInputs.mask` of each row
    dropout: Array | None = None  # `SlabInputs.dropout` of each row or, for windows, of each head
    scale: Float[Array, " H"] | None = None
    first: Int[Array, "B D"] | None = None  # `Slab.first`; for windows only

    def grid(self, s: SlabSettings) -> tuple[int, int, int, int]:
        """Returns the numbers of groups of heads, tiles of a block, rows, and blocks of a row."""
        # The cores of a chip divide the first axis of the grid among themselves. This axis is the
        # heads, so that all steps that add to the gradients of a head's bias run on one core.
        heads = self.q.shape[1] if self.q.ndim == 4 else self.q.shape[2] // s.wide
        steps = self.q.shape[-2 if self.q.ndim == 4 else 1] // s.queries
        blocks = steps if s.window else len(self.keys[0]) // len(self.q)
        return heads, steps // blocks, len(self.q), blocks

    def numbers(self, s: SlabSettings) -> tuple[int, ...]:
        """Returns the shape of an array with one number for each query and head.

        It is [B, groups of heads, heads of a group, T].
        """
        heads, tiles, batch, blocks = self.grid(s)
        return batch, heads, s.together, tiles * blocks * s.queries


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def attend(arguments: SlabArguments, settings: SlabSettings) -> tuple[Array, Array]:
    """Returns the output, [B, T, H, K] or [B, T, HK], and the log-sum-exp [B, H, T]."""
    return _forward(arguments, settings)[0]


def _forward(arguments: SlabArguments, settings: SlabSettings) -> tuple[tuple[Array, Array], tuple]:
    specs, q = _specs(arguments, settings), arguments.q
    shapes = (
        jax.ShapeDtypeStruct(q.shape, bits_dtype(q.dtype)),
        jax.ShapeDtypeStruct(arguments.numbers(settings), jnp.uint32),
    )
    y, lse = _call(
        forward_kernel, arguments, settings, _inputs(arguments),
        specs._replace(gradient=None, lse=None, delta=None), (specs.q, specs.lse), shapes,
    )  # fmt: skip
    y, lse = output_residual(y, q.dtype), output_residual(lse, lse.dtype)
    # If the kernel normalizes queries and keys, the backward pass reads the arrays before
    # normalization. `input_residual` lets a rematerialized layer save these arrays.
    if arguments.scale is not None:
        saved = [input_residual(q), *(
            (*x[:-1], input_residual(x[-1])) if settings.window else x
            for x in (arguments.keys, arguments.values)
        )]  # fmt: skip
        arguments = arguments._replace(q=saved[0], keys=saved[1], values=saved[2])
    sums = from_bits(lse, jnp.float32).reshape(len(q), -1, lse.shape[-1])
    return (tokens_first(y) if y.ndim == 4 else y, sums), (arguments, y, lse)


def _backward(
    settings: SlabSettings, residuals: tuple, gradients: tuple[Array, Array]
) -> tuple[SlabArguments]:
    (arguments, y, lse), (gradient, d_lse), s = residuals, gradients, settings
    if y.ndim == 4:
        gradient = gradient.swapaxes(1, 2)
    products = gradient.astype(jnp.float32) * y.astype(jnp.float32)
    if y.ndim == 3:
        products = products.reshape(*y.shape[:2], -1, s.width).swapaxes(1, 2)
    delta = (jnp.sum(products, axis=-1) - d_lse).reshape(lse.shape)
    inputs = _inputs(arguments)._replace(gradient=gradient, lse=lse, delta=delta)
    # A call has at most `kept_rows` rows of the batch, because VMEM has no room for the sums of the
    # gradients of more rows.
    rows = [slice(i, i + s.kept_rows) for i in range(0, len(y), s.kept_rows)]
    parts = [_call_backward(*_some_rows(arguments, inputs, each), s) for each in rows]
    results = parts[0]
    if len(parts) > 1:
        joined = jax.tree.map(
            lambda *x: jnp.concatenate(x), *(p._replace(bias=None) for p in parts)
        )
        bias = None if results.bias is None else sum(p.bias for p in parts[1:]) + results.bias
        results = joined._replace(bias=bias)
    keys, values = [results.keys], [results.values]
    if s.window:
        keys, values = [results.cached_keys, *keys], [results.cached_values, *values]
    if y.ndim == 4:
        groups = arguments.keys[0].shape[1]
        keys, values = (
            [summed_over_groups(x, groups, axis=1) for x in pair] for pair in (keys, values)
        )
    if s.normalizes_keys:
        raw = arguments.keys[0]
        keys[0] = l2_normalize_rows_backward(raw, keys[0])[0].astype(raw.dtype)
    scale = None if results.scale is None else results.scale[:, 0, 0]
    return (
        SlabArguments(results.q, tuple(keys), tuple(values), results.bias, None, None, scale, None),
    )  # fmt: skip


attend.defvjp(_forward, _backward)


def _some_rows(
    arguments: SlabArguments, inputs: SlabInputs, rows: slice
) -> tuple[SlabArguments, SlabInputs]:
    """Returns the arguments and inputs of some rows of the batch; every row must have one slab."""
    if rows.start == 0 and rows.stop >= len(arguments.q):
        return arguments, inputs
    shared = {"bias": None, "scale": None}
    by_row = arguments._replace(**shared), inputs._replace(**shared)
    cut = jax.tree.map(lambda x: x[rows], by_row)
    kept = {"bias": arguments.bias, "scale": arguments.scale}
    return cut[0]._replace(**kept), cut[1]._replace(bias=inputs.bias, scale=inputs.scale)


def _call_backward(arguments: SlabArguments, inputs: SlabInputs, s: SlabSettings) -> SlabGradients:
    heads, tiles, batch, _ = arguments.grid(s)
    specs, q = _specs(arguments, s, reverse=True), arguments.q
    # The kernel writes gradients of keys and values for each head of queries.
    by_head = heads if q.ndim == 4 else None

    def like(x: Array | None, heads: int | None = None) -> jax.ShapeDtypeStruct | None:
        if x is None:
            return None
        return jax.ShapeDtypeStruct(
            x.shape if heads is None else (len(x), heads, *x.shape[2:]), x.dtype
        )

    of_keys = _whole(arguments.keys[-1], arguments, s, last_tile=True)
    cached = None
    if s.window:
        of_keys = specs.q
        cached = pl.BlockSpec((None, None, s.window, s.width), lambda h, t, b, n, _: (b, h, 0, 0))
    cached_keys, cached_values = (
        like(pair[0], by_head) if s.window else None for pair in (arguments.keys, arguments.values)
    )
    shapes = SlabGradients(
        like(q), like(arguments.keys[-1], by_head), like(arguments.values[-1], by_head),
        cached_keys, cached_values, like(inputs.bias if s.learns_bias else None),
        like(inputs.scale),
    )  # fmt: skip
    d_bias = specs.bias if s.learns_bias else None
    slab = 2 * s.window if s.window else arguments.keys[0].shape[-2 if q.ndim == 4 else 1]
    kept = batch if tiles > 1 else 1
    return _call(
        backward_kernel, arguments, s, inputs, specs,
        SlabGradients(specs.q, of_keys, of_keys, cached, cached, d_bias, specs.scale), shapes,
        scratch=[pltpu.VMEM((kept, slab, s.wide), jnp.float32)] * 2,
    )  # fmt: skip


def _inputs(arguments: SlabArguments) -> SlabInputs:
    def parts(x: tuple[Array, ...]) -> tuple[Array, ...]:
        # With a window, x is (cached block, segment). A step reads two blocks of the segment, the
        # block of its queries and the block before, so the segment is passed twice.
        return x if len(x) == 1 else (x[0], x[1], x[1])

    a, scale = arguments, arguments.scale
    if scale is not None:
        scale = jnp.broadcast_to(scale.astype(jnp.float32)[:, None, None], (len(scale), 1, LANES))
    return SlabInputs(a.q, parts(a.keys), parts(a.values), a.bias, a.mask, a.dropout, scale)


def _whole(
    x: Array, arguments: SlabArguments, s: SlabSettings, *, last_tile: bool = False
) -> pl.BlockSpec:
    """Returns the block spec of a whole slab x of keys or values.

    If `last_tile`, returns the block spec of the gradient of x. Only the step of the last tile of
    queries writes this gradient.
    """
    heads, tiles, _, blocks = arguments.grid(s)
    members = 1 if x.ndim == 3 or last_tile else heads // x.shape[1]

    def place(h: Any, t: Any, b: Any, n: Any, _: Any) -> tuple[Any, ...]:
        row = jnp.where(t == tiles - 1, b, 0) if last_tile and tiles > 1 else b * blocks + n
        return (row, 0, h) if x.ndim == 3 else (row, _key_head(h, members), 0, 0)

    shape = (None, x.shape[1], s.wide) if x.ndim == 3 else (None, None, *x.shape[2:])
    return pl.BlockSpec(shape, place)


def _key_head(head: Any, members: int) -> Any:
    # The operator // is not used, because kernels do not support its code for negative numbers.
    return head if members == 1 else jax.lax.div(head, jnp.int32(members))


def _specs(arguments: SlabArguments, s: SlabSettings, *, reverse: bool = False) -> SlabInputs:
    """Returns the specs of all inputs; `reverse` visits the blocks from the last to the first."""
    heads, _, _, blocks = arguments.grid(s)

    def spec(shape: tuple[int | None, ...], place: Callable[..., tuple]) -> pl.BlockSpec:
        def index(h: Any, t: Any, b: Any, n: Any, _: Any) -> tuple:
            return place(h, t, b, blocks - 1 - n if reverse and s.window else n)

        return pl.BlockSpec(shape, index)

    def key_block(x: Array, place: Callable[[Any], Any]) -> pl.BlockSpec:
        members = heads // x.shape[1]
        shape = None, None, s.window, s.width
        return spec(shape, lambda h, t, b, n: (b, _key_head(h, members), place(n), 0))

    def keys(x: tuple[Array, ...]) -> tuple[pl.BlockSpec, ...]:
        if not s.window:
            return (_whole(x[0], arguments, s),)
        return (
            key_block(x[0], lambda n: 0), key_block(x[1], lambda n: jnp.maximum(n - 1, 0)),
            key_block(x[1], lambda n: n),
        )  # fmt: skip

    a, queries = arguments, s.queries
    if a.q.ndim == 3:
        q = spec((None, queries, s.wide), lambda h, t, b, n: (b, t + n, h))
    else:
        q = spec((None, None, queries, s.width), lambda h, t, b, n: (b, h, t + n, 0))
    numbers = spec((None, None, s.together, queries), lambda h, t, b, n: (b, h, 0, t + n))
    bias = mask = dropout = scale = None
    if a.bias is not None:
        rows = a.bias.shape[2] if s.window else queries
        bias = spec((s.together, a.bias.shape[1], rows), lambda h, t, b, n: (h, 0, t))
    if a.mask is not None:
        shared = a.mask.dtype == jnp.float32
        shape = (None, a.mask.shape[1], a.mask.shape[2] if shared else queries)
        mask = spec(shape, lambda h, t, b, n: (b, 0, 0 if shared else t))
    if a.dropout is not None:
        if s.window:
            dropout = spec((None, *a.dropout.shape[1:]), lambda h, t, b, n: (h, 0, 0))
        else:
            dropout = spec((None, 2, queries), lambda h, t, b, n: (b, 0, t))
    if a.scale is not None:
        scale = spec((None, 1, LANES), lambda h, t, b, n: (h, 0, 0))
    return SlabInputs(q, keys(a.keys), keys(a.values), bias, mask, dropout, scale,
                      q, numbers, numbers)  # fmt: skip


def _call(
    kernel: Any, arguments: SlabArguments, s: SlabSettings, inputs: SlabInputs, specs: SlabInputs,
    out_specs: Any, shapes: Any, scratch: list | None = None,
) -> Any:  # fmt: skip
    q, grid = arguments.q, arguments.grid(s)
    steps, backward = math.prod(grid), "_backward" if scratch else ""
    keys = s.window or inputs.keys[0].shape[-2 if q.ndim == 4 else 1]
    # The name tells `brt.planning.kernel_cycles` which kernel it is, how many steps its grid has,
    # and how often the backward kernel goes over the blocks of a segment.
    kind = "slab_attention"
    if s.window:
        kind = "document_attention" if s.part % s.window else "window_attention"
    elif arguments.mask is not None:
        kind += {"float32": "_of_keys", "int8": "_of_masks"}.get(
            arguments.mask.dtype.name, "_of_spans"
        )
    drops = "" if arguments.dropout is None else "_dropout"
    size = f"{s.together}x{s.queries}x{keys}x{s.wide}_{q.dtype}"
    passes = f"_in_{steps // grid[3]}_passes" if backward and s.window else ""
    products = 5 if backward else 2
    moved = jax.tree.leaves((arguments._replace(first=None), shapes))
    first = jnp.zeros((1, 1), jnp.int32) if arguments.first is None else arguments.first
    (results,) = pl.pallas_call(
        functools.partial(kernel, settings=s),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=grid, in_specs=[specs], out_specs=[out_specs],
            scratch_shapes=scratch or [],
        ),
        out_shape=[shapes], name=f"{kind}{backward}{drops}_{size}_{steps}_steps{passes}",
        interpret=s.interpret, compiler_params=parallel_heads(4),
        cost_estimate=pl.CostEstimate(
            flops=2 * products * keys * q.size, transcendentals=keys * q.size // s.width,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in moved),
        ),
    )(first, inputs)  # fmt: skip
    return results
