"""Products of a block's rows (tokens) with weight arrays, as Pallas kernels for TPUs.

For a few hundred rows, the products that XLA compiles take up to three times as long as their
multiplications, because there is one product for each weight array and each product waits for its
operands. Here, one step of the grid computes a tile of the products with all weight arrays, while
the operands of the next step are fetched. The inputs or outputs that are divided into heads have
the axis of heads before the axis of rows, as in the kernels of attention.

Arguments named `kernels` are weight arrays, not Pallas kernels.

In shapes, B is the number of lanes (rows of the batch), R of rows of a lane, and C the size of the
axis that all weight arrays share; *inputs and *outputs stand for the other axes.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from brt.ops import dispatch
from brt.ops.block_products.reference import Kernels
from brt.ops.block_products.wide import HeadLayout, Weights, compiler_options, refusal
from brt.ops.tpu import LANES, NN, NT, dot_float32, vmem_budget, vmem_refusal

# A tile of `shared_input_matmul` has at most this many output columns, added up over all weight
# arrays. Each weight array may have 128 columns in any case, even if the sum is then greater.
_COLUMNS = 512
# An output tile of `summed_matmul` has one of these numbers of columns.
_TILES = 256, LANES
# The estimate of the VMEM that `summed_matmul` needs assumes that the compiler keeps at most this
# many intermediate results, such as partial sums, in VMEM at once. Each is a float32 array of the
# size of an output tile.
_SUMS = 8


def shared_input_refusal(x: Array, kernels: Kernels, *, transposed: bool, **_: Any) -> str | None:
    """Returns the reason why `shared_input_matmul` does not support these inputs, or None if it
    does.

    The arguments are the same as for `shared_input_matmul`.
    """
    first, *others = (
        HeadLayout.from_kernel(kernel, narrow_first=not transposed) for kernel in kernels
    )
    if any(wide != first for wide in others):
        return "takes kernels of one shape"
    if reason := refusal(x.shape[:-1], x.dtype, x.shape[-1], [first]):
        return reason
    (rows, narrow), (heads, width) = x.shape[1:], _with_tiles(first, kernels).tile
    columns = len(kernels) * heads * max(width, LANES)
    taken = 2 * 2 * (rows * (narrow + 2 * columns) + narrow * columns) + 4 * rows * columns
    return vmem_refusal(taken, "a block's rows")


def _with_tiles(wide: HeadLayout, kernels: Kernels) -> HeadLayout:
    return wide.with_tiles(max(LANES, _COLUMNS // len(kernels)))


def shared_input_matmul(
    x: Float[Array, "B R C"],
    kernels: Kernels,
    *,
    transposed: bool = False,
    relu: bool = False,
    where: Array | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Array, ...]:
    """Returns the products of x with several weight arrays, one array [B, R, *outputs] for each
    weight array.

    Args:
      x: the input, whose last axis the products sum over.
      kernels: the weight arrays, all of one shape: [C, *outputs] or, if `transposed`,
        [*outputs, C].
      transposed: True if the products sum over the last axis of the weight arrays.
      relu: True returns max(product, 0) and marks the result by `dispatch.output_residual`, so that
        rematerialized layers (`jax.checkpoint`) can save it.
      where: an array in the shape of a product; each product is set to 0 where the entry of `where`
        is not positive. None changes nothing.
      interpret: True runs the kernel on any device, slowly, and with any sizes.
    """
    count, (lanes, rows, narrow) = len(kernels), x.shape
    wide = _with_tiles(HeadLayout.from_kernel(kernels[0], narrow_first=not transposed), kernels)
    heads, columns = wide.tile

    def output_index(i: Any, lane: Any) -> tuple:
        """Returns the index of the output's block that a step of the grid writes, for a Pallas
        `BlockSpec`.

        The output is an array [A, B, H, R, K], in which each row has A groups of H heads with K
        numbers. The index has an entry for each of these axes.

        Args:
          i: the index of the step's tile of columns.
          lane: the index of the step's lane.
        """
        a, h, k = wide.tile_index(i)
        return a, lane, h, 0, k

    output_spec = pl.BlockSpec((None, None, heads, rows, columns), output_index)
    weights = Weights.of(kernels, [wide] * count, x.dtype, narrow_first=not transposed)
    masks = None if where is None else [wide.by_head(dispatch.to_bits(where))]
    shape = wide.groups, lanes, wide.heads, rows, wide.width
    products = pl.pallas_call(
        functools.partial(_shared_input_kernel, axes=NT if transposed else NN, relu=relu),
        grid=(wide.tiles, lanes),
        in_specs=[
            pl.BlockSpec((None, rows, narrow), lambda _, lane: (lane, 0, 0)),
            weights.wide_tile_specs(wide, narrow), masks and [output_spec],
        ],
        out_specs=[[output_spec] * count],
        out_shape=[
            [jax.ShapeDtypeStruct(shape, dispatch.bits_dtype(x.dtype) if relu else x.dtype)] * count
        ],
        name=f"shared_input_matmul_{rows}x{narrow}x{count * heads * columns}_{x.dtype}_"
        f"{wide.tiles * lanes}_steps",
        interpret=interpret,
        **compiler_options(count * wide.size * x.size, x, *weights.arrays),
    )(x, weights.arrays, masks)[0]  # fmt: skip
    if relu:
        products = [dispatch.output_residual(y, x.dtype) for y in products]
    axes = kernels[0].shape[:-1] if transposed else kernels[0].shape[1:]
    return tuple(wide.by_row(y, axes) for y in products)


def _shared_input_kernel(
    x: Any, kernels: list[Any], masks: list[Any] | None, outputs: list[Any], *, axes: tuple,
    relu: bool,
) -> None:  # fmt: skip
    """Computes a tile of all products. Masks, and outputs with `relu`, contain the bits of
    floating-point numbers as integers.
    """
    for kernel, output in zip(kernels, outputs, strict=True):
        for head in range(kernel.shape[0]):
            product = dot_float32(x[...], kernel[head], axes)
            if relu:
                product = jnp.maximum(product, 0)
            for mask in masks or ():
                product = jnp.where(dispatch.from_bits(mask[head], x.dtype) > 0, product, 0)
            product = product.astype(x.dtype)
            output[head] = dispatch.to_bits(product) if relu else product


def summed_refusal(
    xs: Sequence[Array], kernels: Kernels, *, transposed: bool, **_: Any
) -> str | None:
    """Returns the reason why `summed_matmul` does not support these inputs, or None if it does.

    The arguments are the same as for `summed_matmul`.
    """
    wides = [HeadLayout.from_kernel(kernel, narrow_first=transposed) for kernel in kernels]
    rows = xs[0].shape[: xs[0].ndim - kernels[0].ndim + 1]
    narrow = kernels[0].shape[0 if transposed else -1]
    if reason := refusal(rows, xs[0].dtype, narrow, wides):
        return reason
    return vmem_refusal(_bytes(rows, wides, _TILES[-1]), "a block's rows")


def _bytes(rows: tuple[int, ...], wides: Sequence[HeadLayout], columns: int) -> int:
    """Returns the bytes of VMEM that `summed_matmul` needs for the inputs of a lane, a tile of the
    weight arrays, and a tile of the output.
    """
    size = sum(wide.padded_size for wide in wides)
    return 2 * size * (_buffers(rows[0]) * rows[1] + 2 * columns) + _SUMS * 4 * rows[1] * columns


def _columns(rows: tuple[int, ...], wides: Sequence[HeadLayout], narrow: int) -> int:
    """Returns the largest number of columns of a tile that fits into VMEM."""
    tiles = [math.gcd(narrow, columns) for columns in _TILES]
    fit = (columns for columns in tiles if _bytes(rows, wides, columns) <= vmem_budget())
    return next(fit, tiles[-1])


def _buffers(lanes: int) -> int:
    """Returns the number of buffers of operands that are the same in all steps of a lane."""
    return 1 if lanes == 1 else 2


def summed_matmul(
    xs: Sequence[Float[Array, "..."]],
    kernels: Kernels,
    *,
    transposed: bool = False,
    as_bits: bool = False,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "B R C"]:
    """Returns the sum [B, R, C] of the products of each input with its weight array.

    Args:
      xs: the inputs, each [B, R, *inputs].
      kernels: the weight arrays, [*inputs, C] or, if `transposed`, [C, *inputs].
      transposed: True if the first axis of each weight array, not the last, is the output.
      as_bits: True passes the inputs to the kernel as integers with the same bits. This saves a
        conversion if the inputs are results of `dispatch.output_residual`, which stores arrays of
        floating-point numbers as such integers.
      interpret: True runs the kernel on any device, slowly, and with any sizes.
    """
    wides = [HeadLayout.from_kernel(kernel, narrow_first=transposed) for kernel in kernels]
    rows, dtype = xs[0].shape[:2], xs[0].dtype
    narrow, size = kernels[0].shape[0 if transposed else -1], sum(wide.size for wide in wides)
    columns = _columns(rows, wides, narrow)
    steps = narrow // columns

    def all_heads_spec(wide: HeadLayout) -> pl.BlockSpec:
        """Returns the block spec with which a step of the grid reads an input [A, B, H, R, K].

        A step reads the rows of all A * H heads of one lane (index along B). `wide` has the sizes
        of A, H and K.
        """
        shape = wide.groups, None, wide.heads, rows[1], wide.width
        return pl.BlockSpec(
            shape, lambda _, lane: (0, lane, 0, 0, 0), pipeline_mode=pl.Buffered(_buffers(rows[0]))
        )

    def by_head(x: Array, wide: HeadLayout) -> Array:
        """Returns an input x [B, R, *inputs] as an array [A, B, H, R, K], where `wide` has the
        sizes of A, H and K.

        If `as_bits` is True, the result has integers with the same bits as the numbers of x.
        """
        return wide.by_head(dispatch.to_bits(x) if as_bits else x)

    weights = Weights.of(kernels, wides, dtype, narrow_first=transposed)
    total = pl.pallas_call(
        functools.partial(_summed_kernel, axes=NT if transposed else NN, dtype=dtype),
        grid=(steps, rows[0]),
        in_specs=[
            [all_heads_spec(wide) for wide in wides], weights.narrow_tile_specs(wides, columns)
        ],
        out_specs=pl.BlockSpec((None, rows[1], columns), lambda i, lane: (lane, 0, i)),
        out_shape=jax.ShapeDtypeStruct(
            (*rows, narrow), dtype if transposed else dispatch.bits_dtype(dtype)
        ),
        name=f"summed_matmul_{rows[1]}x{size}x{columns}_{dtype}_{steps * rows[0]}_steps",
        interpret=interpret,
        **compiler_options(math.prod(rows) * narrow * size, *xs, *weights.arrays),
    )([by_head(*pair) for pair in zip(xs, wides, strict=True)], weights.arrays)  # fmt: skip
    return total if transposed else dispatch.output_residual(total, dtype)


def _summed_kernel(
    xs: list[Any], kernels: list[Any], output: Any, *, axes: tuple, dtype: jnp.dtype
) -> None:
    def as_numbers(x: Array) -> Array:
        """Returns x if x has floating-point numbers. If x has integers, returns the floating-point
        numbers with the same bits.
        """
        return x if x.dtype == dtype else dispatch.from_bits(x, dtype)

    total = functools.reduce(
        jnp.add,
        (
            dot_float32(as_numbers(x[group, head]), kernel[group, head], axes)
            for x, kernel in zip(xs, kernels, strict=True)
            for group in range(kernel.shape[0])
            for head in range(kernel.shape[1])
        ),
    )
    total = total.astype(dtype)
    output[...] = total if output.dtype == dtype else dispatch.to_bits(total)


interpreted_shared_input_matmul = functools.partial(shared_input_matmul, interpret=True)
interpreted_summed_matmul = functools.partial(summed_matmul, interpret=True)
