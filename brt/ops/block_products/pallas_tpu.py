"""Products of a block's rows on TPUs, with several kernels at once and heads first.

For a few hundred rows, compiled products take up to three times as long as their multiplications,
because there is one product for each kernel and each waits for its operands. Here, a step of the
grid computes a tile of all kernels while the tile for the next step is fetched. The rows of a head
lie together, as attention reads and writes them.
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
from brt.ops.block_products.reference import NOTHING, Added, Kernels
from brt.ops.block_products.wide import Weights, Wide, options, refuses
from brt.ops.tpu import LANES, NN, NT, dot_float32, vmem_budget, vmem_refusal

_COLUMNS = 512  # of all kernels, of a tile
_TILES = 256, LANES  # columns of a sum
_SUMS = 8  # of a tile, that there are at once where compilers keep most


def refuses_spread(x: Array, kernels: Kernels, *, transposed: bool, **_: Any) -> str | None:
    """Returns why `spread` does not support these inputs, or None."""
    first, *others = (Wide.of(kernel, narrow_first=not transposed) for kernel in kernels)
    if any(wide != first for wide in others):
        return "takes kernels of one shape"
    if reason := refuses(x.shape[:-1], x.dtype, x.shape[-1], [first]):
        return reason
    (rows, narrow), (heads, width) = x.shape[1:], _cut(first, kernels).tile
    columns = len(kernels) * heads * max(width, LANES)
    taken = 2 * 2 * (rows * (narrow + 2 * columns) + narrow * columns) + 4 * rows * columns
    return vmem_refusal(taken, "a block's rows")


def _cut(wide: Wide, kernels: Kernels) -> Wide:
    return wide.cut(max(LANES, _COLUMNS // len(kernels)))


def spread(
    x: Float[Array, "B R C"],
    kernels: Kernels,
    *,
    transposed: bool = False,
    relu: bool = False,
    where: Array | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Array, ...]:
    """Implements `api.spread`; with `interpret`, it runs on any device and with any sizes."""
    count, (lanes, rows, narrow) = len(kernels), x.shape
    wide = _cut(Wide.of(kernels[0], narrow_first=not transposed), kernels)
    heads, columns = wide.tile

    def out(i: Any, lane: Any) -> tuple:
        a, h, k = wide.place(i)
        return a, lane, h, 0, k

    outs = pl.BlockSpec((None, None, heads, rows, columns), out)
    weights = Weights.of(kernels, [wide] * count, x.dtype, narrow_first=not transposed)
    masks = None if where is None else [wide.by_head(dispatch.to_bits(where))]
    shape = wide.groups, lanes, wide.heads, rows, wide.width
    found = pl.pallas_call(
        functools.partial(_spread, axes=NT if transposed else NN, relu=relu),
        grid=(wide.tiles, lanes),
        in_specs=[
            pl.BlockSpec((None, rows, narrow), lambda _, lane: (lane, 0, 0)),
            weights.spread(wide, narrow), masks and [outs],
        ],
        out_specs=[[outs] * count],
        out_shape=[
            [jax.ShapeDtypeStruct(shape, dispatch.bits_dtype(x.dtype) if relu else x.dtype)] * count
        ],
        name=f"spread_{rows}x{narrow}x{count * heads * columns}_{x.dtype}_"
        f"{wide.tiles * lanes}_steps",
        interpret=interpret,
        **options(count * wide.size * x.size, x, *weights.arrays),
    )(x, weights.arrays, masks)[0]  # fmt: skip
    if relu:
        found = [dispatch.output_residual(y, x.dtype) for y in found]
    axes = kernels[0].shape[:-1] if transposed else kernels[0].shape[1:]
    return tuple(wide.by_row(y, axes) for y in found)


def _spread(
    x: Any, kernels: list[Any], masks: list[Any] | None, found: list[Any], *, axes: tuple,
    relu: bool,
) -> None:  # fmt: skip
    """Computes the products; masks and relu's residuals are bits."""
    for kernel, y in zip(kernels, found, strict=True):
        for head in range(kernel.shape[0]):
            own = dot_float32(x[...], kernel[head], axes)
            if relu:
                own = jnp.maximum(own, 0)
            for mask in masks or ():
                own = jnp.where(dispatch.from_bits(mask[head], x.dtype) > 0, own, 0)
            own = own.astype(x.dtype)
            y[head] = dispatch.to_bits(own) if relu else own


def refuses_gathered(
    xs: Sequence[Array], kernels: Kernels, *, transposed: bool, added: Added = NOTHING, **_: Any
) -> str | None:
    """Returns why `gathered` does not support these inputs, or None."""
    wides = [Wide.of(kernel, narrow_first=transposed) for kernel in kernels]
    rows = xs[0].shape[: xs[0].ndim - kernels[0].ndim + 1]
    narrow = kernels[0].shape[0 if transposed else -1]
    if reason := refuses(rows, xs[0].dtype, narrow, wides):
        return reason
    taken = _bytes(rows, wides, _TILES[-1], added)
    if reason := vmem_refusal(taken, "a block's rows"):
        return reason
    steps = narrow // _columns(rows, wides, narrow, added)
    if any(wides[i].heads % steps for i in added):
        return f"adds to heads that are a multiple of its {steps} steps"
    return None


def _bytes(rows: tuple[int, ...], wides: Sequence[Wide], columns: int, added: Added) -> int:
    """Returns the bytes of VMEM for all rows of the wide side, a tile of its weights, and the
    output.
    """
    sizes = [wide.held for wide in wides]
    several = [sizes[i] for i in added]
    there = 2 * rows[1] * (_buffers(rows[0]) * (sum(sizes) + sum(several)) + sum(several) // 2)
    return there + 2 * 2 * columns * sum(sizes) + _SUMS * 4 * rows[1] * columns


def _columns(rows: tuple[int, ...], wides: Sequence[Wide], narrow: int, added: Added) -> int:
    """Returns the largest number of columns of a tile that fits into VMEM."""
    tiles = [math.gcd(narrow, columns) for columns in _TILES]
    fit = (columns for columns in tiles if _bytes(rows, wides, columns, added) <= vmem_budget())
    return next(fit, tiles[-1])


def _buffers(lanes: int) -> int:
    """Returns the number of buffers of operands that are the same in all steps of a lane."""
    return 1 if lanes == 1 else 2


def gathered(
    xs: Sequence[Float[Array, "..."]],
    kernels: Kernels,
    *,
    transposed: bool = False,
    as_bits: bool = False,
    added: Added = NOTHING,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Float[Array, "B R C"], dict[int, Array]]:
    """Implements `api.gathered`; with `interpret`, it runs on any device and with any sizes."""
    wides = [Wide.of(kernel, narrow_first=transposed) for kernel in kernels]
    rows, dtype = xs[0].shape[:2], xs[0].dtype
    narrow, size = kernels[0].shape[0 if transposed else -1], sum(wide.size for wide in wides)
    columns = _columns(rows, wides, narrow, added)
    steps = narrow // columns

    def own(wide: Wide) -> pl.BlockSpec:
        shape = wide.groups, None, wide.heads, rows[1], wide.width
        return pl.BlockSpec(
            shape, lambda _, lane: (0, lane, 0, 0, 0), pipeline_mode=pl.Buffered(_buffers(rows[0]))
        )

    def some(wide: Wide) -> pl.BlockSpec:
        """Adds up the products of some heads in one step."""
        shape = wide.groups, None, wide.heads // steps, rows[1], wide.width
        return pl.BlockSpec(shape, lambda i, lane: (0, lane, i, 0, 0))

    def by_head(x: Array, wide: Wide) -> Array:
        return wide.by_head(dispatch.to_bits(x) if as_bits else x)

    weights = Weights.of(kernels, wides, dtype, narrow_first=transposed)
    others = {i: by_head(x, wides[i]) for i, x in added.items()}
    found, sums = pl.pallas_call(
        functools.partial(_gathered, axes=NT if transposed else NN, dtype=dtype),
        grid=(steps, rows[0]),
        in_specs=[
            [own(wide) for wide in wides], {i: own(wides[i]) for i in others},
            weights.gathered(wides, columns),
        ],
        out_specs=[
            pl.BlockSpec((None, rows[1], columns), lambda i, lane: (lane, 0, i)),
            {i: some(wides[i]) for i in others},
        ],
        out_shape=[
            jax.ShapeDtypeStruct((*rows, narrow), dtype if transposed else
            dispatch.bits_dtype(dtype)), {i: jax.ShapeDtypeStruct(x.shape, dtype) for i, x in
            others.items()},
        ],
        name=f"gathered_{rows[1]}x{size}x{columns}_{dtype}_{steps * rows[0]}_steps",
        interpret=interpret,
        **options(math.prod(rows) * narrow * size, *xs, *added.values(), *weights.arrays),
    )([by_head(*pair) for pair in zip(xs, wides, strict=True)], others, weights.arrays)  # fmt: skip
    own_axes = {i: kernels[i].shape[1:] if transposed else kernels[i].shape[:-1] for i in added}
    summed = {i: wides[i].by_row(x, own_axes[i]) for i, x in sums.items()}
    return found if transposed else dispatch.output_residual(found, dtype), summed


def _gathered(
    xs: list[Any], added: dict[int, Any], kernels: list[Any], found: Any, sums: dict[int, Any], *,
    axes: tuple, dtype: jnp.dtype,
) -> None:  # fmt: skip
    def numbers(i: int, group: int, head: Any) -> Array:
        own = xs[i][group, head]
        if i in added:
            both = own.astype(jnp.float32) + added[i][group, head].astype(jnp.float32)
            return both.astype(dtype)
        return own if own.dtype == dtype else dispatch.from_bits(own, dtype)

    total = functools.reduce(
        jnp.add,
        (
            dot_float32(numbers(i, group, head), kernel[group, head], axes)
            for i, kernel in enumerate(kernels)
            for group in range(kernel.shape[0])
            for head in range(kernel.shape[1])
        ),
    )
    total = total.astype(dtype)
    found[...] = total if found.dtype == dtype else dispatch.to_bits(total)
    for i, own in sums.items():
        first = pl.program_id(0) * own.shape[1]
        for group in range(own.shape[0]):
            for head in range(own.shape[1]):
                own[group, head] = numbers(i, group, first + head)


interpreted_spread = functools.partial(spread, interpret=True)
interpreted_gathered = functools.partial(gathered, interpret=True)
