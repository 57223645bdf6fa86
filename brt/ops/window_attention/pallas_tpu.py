"""Window attention on TPUs: logits, softmax and the bias's gradient stay in on-chip memory.

The grid is (head, row of the batch, block). A step of the grid computes one block of W queries with
the W keys of its own block and of the previous block. From here on, a row is a query. Each row sees
W of these 2 W keys, and the kernels keep the keys of a row in W slots: slot c is key c of the row's
own block if the row sees this key, and otherwise key c of the previous block. A row therefore has
one softmax over W slots. Logits and weights are matrices of slots x rows. Maxima and sums then go
along the sublanes of vector registers, and numbers per row (log-sum-exp and the sum that the
softmax's gradient subtracts) are row vectors. A block is processed in tiles of R rows, which need
only the keys that they see. The bias of all tiles is one circulant matrix [W, R], rolled by a
multiple of R along the slots, so that its gradient is one sum [W, R], too.

The backward pass recomputes the weights from the log-sum-exp. Its steps go through the blocks of a
segment from the last to the first. The gradients of a block's keys and values stay in VMEM until
the queries of the block itself have added to them. The kernel writes them for each head of queries,
and XLA sums them over the heads that share a head of keys. For the cached keys, the kernel writes
the gradients of the normalized keys. XLA then computes the gradients of the keys themselves, or
nothing if they are not used.

Windows that are too long for a kernel are split into shorter ones (`subwindows`). In shapes, G is
the number of heads of keys and values, N of blocks of a segment, and D of its parts; documents
start only at starts of parts.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, UInt32

from brt.ops.dispatch import bits_dtype, from_bits, input_residual, output_residual
from brt.ops.dropout import DropoutMask
from brt.ops.grouped_heads import summed_over_groups
from brt.ops.tpu import (
    LANES,
    l2_normalize_rows_backward,
    parallel_heads,
    tokens_first,
)
from brt.ops.window_attention import tpu_bias
from brt.ops.window_attention.subwindows import attend_to_subwindows
from brt.ops.window_attention.tpu_arrays import (
    WindowBlocks,
    WindowKernelGradients,
    WindowKernelInputs,
)
from brt.ops.window_attention.tpu_kernels import backward_kernel, forward_kernel
from brt.ops.window_attention.tpu_specs import block_specs
from brt.ops.window_attention.tpu_tiles import WindowKernelSettings
from brt.ops.window_attention.tpu_windows import MOST_ROWS, kernel_window


def window_attention(
    queries: Float[Array, "B T H K"],
    cached: tuple[Float[Array, "B W G K"], Float[Array, "B W G K"]],
    keys: Float[Array, "B T G K"],
    values: Float[Array, "B T G K"],
    bias: Float[Array, "H W"] | None,
    first: Int[Array, "B D"],
    dropout: DropoutMask | None = None,
    *,
    attend_to_self: bool,
    null_keys: bool = False,
    scale: Float[Array, " H"] | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B T H"]]:
    """Implements `api.window_part` with places of documents in the place of the cache mask.

    Args:
      cached: T is a multiple of its W tokens, or of the sub-window into which the window is split
        (`tpu_windows.kernel_window`).
      first: for each of D parts of the segment, the place of the first token of its document, a
        multiple of T / D (see `documents`).
      null_keys: must be False if documents may start inside of a block.
      interpret: True runs the kernels on any device, slowly, and with windows of any size.
    """
    size = cached[0].shape[1]
    if not interpret:
        size = kernel_window(queries, size, drops=dropout is not None, null_keys=null_keys)
    if size < cached[0].shape[1]:
        attend = functools.partial(window_attention, attend_to_self=attend_to_self, scale=scale)
        return attend_to_subwindows(attend, size, queries, cached, keys, values, bias, first)
    window, part = cached[0].shape[1], queries.shape[1] // first.shape[1]
    rows = window if window % MOST_ROWS else MOST_ROWS
    if part % window:
        rows = math.gcd(rows, part)
    settings = WindowKernelSettings(attend_to_self, null_keys, rows, interpret, part)
    words = None
    if dropout is not None:
        settings, words = settings._replace(scale=dropout.scale), dropout.packed_words()
    arrays = queries, keys, values, *cached
    q, k, v, cached_k, cached_v = (x.swapaxes(1, 2) for x in arrays)
    arguments = _Arguments(q, k, v, cached_k, cached_v, scale, bias, first, words)
    y, lse = _attend(arguments, settings)
    return y, lse.swapaxes(1, 2)


interpreted = functools.partial(window_attention, interpret=True)


class _Arguments(NamedTuple):
    q: Float[Array, "B H T K"]
    k: Float[Array, "B G T K"]
    v: Float[Array, "B G T K"]
    cached_k: Float[Array, "B G W K"]
    cached_v: Float[Array, "B G W K"]
    scale: Float[Array, " H"] | None
    bias: Float[Array, "H W"] | None
    first: Int[Array, "B D"]
    # The mask is packed by `dropout_bits` along the slots; here, G is the number of words of a row.
    dropout: UInt32[Array, "H G W"] | None

    @property
    def window(self) -> int:
        return self.cached_k.shape[2]

    @property
    def grid(self) -> tuple[int, int, int]:
        """The numbers of heads, rows of the batch and blocks, which are the axes of the grid."""
        # The cores of a chip divide the first axis of the grid among themselves. This axis is the
        # heads, so that all steps that add to the bias gradient of a head run on one core.
        return self.q.shape[1], self.q.shape[0], self.q.shape[2] // self.window

    def rows_by_block(self, x: Float[Array, "B H T"]) -> Float[Array, "B H N 1 W"]:
        """Returns x as one row vector for each block."""
        return x.reshape(*x.shape[:2], -1, 1, self.window)

    def bias_tile(self, settings: WindowKernelSettings) -> Float[Array, "H W R"] | None:
        if self.bias is None:
            return None
        return tpu_bias.bias_tile(
            self.bias, settings.rows, settings.attend_to_self, settings.interpret
        )

    def kernel_inputs(self, tile: Array | None, **others: Array) -> WindowKernelInputs:
        """Returns the kernels' inputs; `others` are those that only the backward pass has."""
        scale = None
        if self.scale is not None:
            scale = jnp.broadcast_to(self.scale[:, None, None], (len(self.scale), 1, LANES))
        pairs = (
            WindowBlocks(self.cached_k, self.k, self.k),
            WindowBlocks(self.cached_v, self.v, self.v),
        )
        return WindowKernelInputs(self.q, *pairs, scale, tile, self.dropout, **others)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _attend(
    arguments: _Arguments, settings: WindowKernelSettings
) -> tuple[Float[Array, "B T H K"], Float[Array, "B H T"]]:
    return _forward(arguments, settings)[0]


def _forward(
    arguments: _Arguments, settings: WindowKernelSettings
) -> tuple[tuple[Array, Array], tuple]:
    (heads, batch, blocks), q = arguments.grid, arguments.q
    inputs = arguments.kernel_inputs(arguments.bias_tile(settings))
    specs = block_specs(inputs, blocks)
    each = jax.ShapeDtypeStruct((batch, heads, blocks, 1, arguments.window), jnp.uint32)
    rows = pl.BlockSpec((None, None, None, 1, arguments.window), lambda h, b, n, _: (b, h, n, 0, 0))
    ((y, lse),) = pl.pallas_call(
        functools.partial(forward_kernel, settings=settings),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=arguments.grid, in_specs=[specs],
            out_specs=[(specs.q, rows)],
        ),
        out_shape=[(jax.ShapeDtypeStruct(q.shape, bits_dtype(arguments.v.dtype)), each)],
        cost_estimate=_cost(arguments, products=2),
        **_options(arguments, settings, "window_attention"),
    )(arguments.first, inputs)  # fmt: skip
    y, lse = output_residual(y, arguments.v.dtype), output_residual(lse, lse.dtype)
    sums = from_bits(lse, jnp.float32).reshape(q.shape[:-1])
    # If the kernel normalizes queries and keys, the backward pass reads the queries and keys before
    # normalization, and the values. `input_residual` lets a rematerialized layer save all three.
    if arguments.scale is not None:
        q, k, v = map(input_residual, arguments[:3])
        arguments = arguments._replace(q=q, k=k, v=v)
    # The bias tile is saved for the backward pass only if the segment has one block. For longer
    # segments, the backward pass computes the tile again, which costs little per block and saves
    # memory.
    tile = arguments.bias_tile(settings) if blocks == 1 else None
    tile = None if tile is None else input_residual(tile)
    return (tokens_first(y), sums), (arguments, y, lse, tile)


def _backward(
    settings: WindowKernelSettings, residuals: tuple, gradients: tuple[Array, Array]
) -> tuple[_Arguments]:
    arguments, y, lse, tile = residuals
    gradient, d_lse = gradients[0].swapaxes(1, 2), gradients[1]
    heads, batch, blocks = arguments.grid
    along = jnp.sum(gradient.astype(jnp.float32) * y.astype(jnp.float32), axis=-1) - d_lse
    along = arguments.rows_by_block(along)
    if tile is None:
        tile = arguments.bias_tile(settings)
    inputs = arguments.kernel_inputs(tile, gradient=gradient, lse=lse, along=along)
    specs = block_specs(inputs, blocks, reverse=True)
    window, width = arguments.window, arguments.q.shape[3]
    cached_spec = pl.BlockSpec((None, None, window, width), lambda h, b, n, _: (b, h, 0, 0))

    # The kernel writes gradients of keys and values for each head of queries.
    def by_query_head(x: Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch, heads, *x.shape[2:]), x.dtype)

    like = WindowKernelGradients(
        arguments.q, by_query_head(arguments.k), by_query_head(arguments.v),
        by_query_head(arguments.cached_k), by_query_head(arguments.cached_v),
        inputs.scale, inputs.tile,
    )  # fmt: skip
    (results,) = pl.pallas_call(
        functools.partial(backward_kernel, settings=settings),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=arguments.grid, in_specs=[specs],
            out_specs=[
                WindowKernelGradients(
                    specs.q, specs.q, specs.q, cached_spec, cached_spec, specs.scale,
                    specs.tile,
                )
            ],
            scratch_shapes=[pltpu.VMEM((window, width), jnp.float32)] * 2,
        ),
        out_shape=[jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), like)],
        cost_estimate=_cost(arguments, products=5),
        **_options(arguments, settings, "window_attention_backward"),
    )(arguments.first, inputs)  # fmt: skip
    d_scale = None if arguments.scale is None else results.scale[:, 0, 0]
    d_bias = None
    if arguments.bias is not None:
        d_bias = tpu_bias.bias_gradient(results.tile, settings.attend_to_self, settings.interpret)
    k, v, cached_k, cached_v = (
        summed_over_groups(x, arguments.k.shape[1], axis=1) for x in results[1:5]
    )
    if arguments.scale is not None:
        cached_k = l2_normalize_rows_backward(arguments.cached_k, cached_k)[0].astype(k.dtype)
    return (arguments._replace(
        q=results.q, k=k, v=v, cached_k=cached_k, cached_v=cached_v, scale=d_scale, bias=d_bias,
        first=None, dropout=None,
    ),)  # fmt: skip


_attend.defvjp(_forward, _backward)


def _options(arguments: _Arguments, settings: WindowKernelSettings, name: str) -> dict[str, Any]:
    # The name tells `brt.planning.kernel_cycles` which kernel it is, how many steps its grid has,
    # and how often the backward kernel goes over the blocks of a segment.
    q = arguments.q
    if settings.part % arguments.window:
        name = name.replace("window", "document")
    size = f"{arguments.window}x{arguments.window}x{q.shape[-1]}_{q.dtype}"
    drops = "" if arguments.dropout is None else "_dropout"
    heads, batch, blocks = arguments.grid
    passes = f"_in_{heads * batch}_passes" if "backward" in name else ""
    return {
        "name": f"{name}{drops}_{size}_{heads * batch * blocks}_steps{passes}",
        "interpret": settings.interpret,
        "compiler_params": parallel_heads(3),
    }


def _cost(arguments: _Arguments, products: int) -> pl.CostEstimate:
    """Returns the cost of the keys in the window, with one read or write of each array."""
    q = arguments.q
    return pl.CostEstimate(
        flops=2 * products * arguments.window * q.size,
        transcendentals=q.size // q.shape[-1] * arguments.window,
        bytes_accessed=(2 * products - 1) * q.size * q.dtype.itemsize,
    )
