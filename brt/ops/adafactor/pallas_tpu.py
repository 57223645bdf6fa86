"""Adafactor's update on TPUs in one kernel, which reads each array once.

Layers that do not fit into VMEM are read several times. `tpu_kernel` describes the phases.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from brt.distributed import rules
from brt.ops.adafactor.reference import Moments, Updated
from brt.ops.adafactor.tpu_kernel import NORM, SUMS, UPDATE, Tiles, kernel
from brt.ops.tpu import LANES, VMEM_BYTES, vmem_budget, vmem_refusal

_SUBLANES = 8
_MOST_ROWS = 128  # of a tile
# The largest and the smallest tile, in bytes. Smaller tiles take less time than a step of the grid.
_LARGEST, _SMALLEST = 2**20, 2**17


def refusal(gradient: Array, parameter: Array, moments: Moments, *_: Any) -> str | None:
    """Returns why the kernel does not support these inputs, or None if it does."""
    if rules.partitioned():
        return "updates arrays that are whole on one device"
    if any(x.dtype != jnp.float32 for x in (gradient, parameter, *moments)):
        return "computes in float32"
    rows, columns = moments.momentum.shape[1:]
    if rows % _SUBLANES or columns % LANES:
        return f"takes a multiple of 8 rows and of 128 columns, not {rows} and {columns}"
    tiles = tiles_of(parameter, moments)
    if 4 * tiles.tile * columns < _SMALLEST:
        return f"takes tiles of 128 KiB, not of {tiles.tile} rows and {columns} columns"
    return vmem_refusal(_bytes(tiles), "tiles of rows")


def tiles_of(parameter: Array, moments: Moments) -> Tiles:
    layers, rows, columns = moments.momentum.shape
    by_head = parameter.ndim == 4 and parameter.shape[3] == LANES
    heads = parameter.shape[2] if by_head and parameter.shape[2] % _SUBLANES == 0 else 1
    most = min(_MOST_ROWS, max(_SUBLANES, _LARGEST // (4 * columns)))
    sizes = [n for n in range(_SUBLANES, most + 1, _SUBLANES) if rows % n == 0][::-1]
    of_layers = [Tiles(layers, rows, columns, heads, size, True) for size in sizes]
    large = (one for one in of_layers if 4 * one.tile * columns >= _SMALLEST)
    resident = next((one for one in large if _bytes(one) <= vmem_budget()), None)
    return resident or of_layers[0]._replace(resident=False)


def _bytes(tiles: Tiles) -> int:
    """Returns the bytes of VMEM for two buffers of each block, and for scratch memory."""
    lanes = -(-tiles.tile // LANES) * LANES
    counts = -(-tiles.count // _SUBLANES) * _SUBLANES
    blocks = 5 * 2 * tiles.tile * tiles.columns
    vectors = 5 * counts * lanes + (3 + 5) * _SUBLANES * tiles.columns
    return 4 * (blocks + vectors + 3 * tiles.resident * tiles.rows * tiles.columns)


def adafactor(
    gradient: Float[Array, "L A ..."],
    parameter: Float[Array, "L A ..."],
    moments: Moments,
    decay: Float[Array, " L"],
    rate: Float[Array, " L"],
    factor: float = 1.0,
    divisor: Float[Array, ""] | float = 1.0,
    *,
    interpret: bool | pltpu.InterpretParams = False,
) -> Updated:
    """Implements `api.adafactor`."""
    tiles = tiles_of(parameter, moments)
    layers, rows, columns = tiles.layers, tiles.rows, tiles.columns
    shape = (layers, rows * tiles.heads, columns // tiles.heads)
    by_tile, by_column = (layers, tiles.count, tiles.tile), (layers, 1, columns)
    g, p = gradient.reshape(shape), parameter.reshape(shape)
    vectors = [moments.rows.reshape(by_tile), moments.columns.reshape(by_column)]
    arrays = (p, moments.momentum, *vectors)
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    results.append(jax.ShapeDtypeStruct((layers, 1, LANES), p.dtype))  # sums of squares
    *whole, of_layer = (
        pl.BlockSpec((None, *x.shape[1:]), lambda layer, *_: (layer, 0, 0)) for x in results[2:]
    )
    # Reads and writes of arrays as large as the parameter.
    passes = 5 if tiles.resident else 8
    new, momentum, *after = pl.pallas_call(
        functools.partial(kernel, tiles=tiles, factor=factor),
        grid=(layers, 3, tiles.count),
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM), *_input_specs(tiles, shape[2]), *whole,
        ],
        out_specs=[
            _spec(tiles, shape[2], UPDATE), _spec(tiles, columns, UPDATE), *whole, of_layer,
        ],
        out_shape=results,
        input_output_aliases={2: 0, 3: 1},
        scratch_shapes=_scratch(tiles),
        name=f"adafactor_{tiles.tile}x{columns}_float32_{layers * tiles.count}_steps",
        interpret=interpret,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        cost_estimate=pl.CostEstimate(
            flops=0, transcendentals=0, bytes_accessed=passes * parameter.nbytes
        ),
    )(_scalars(decay, rate, divisor), g, p, moments.momentum, *vectors)  # fmt: skip
    of_row, of_column, sums = after
    moments = Moments(of_row.reshape(layers, rows), of_column.reshape(layers, columns), momentum)
    return Updated(new.reshape(parameter.shape), moments, sums[:, 0, 0])


def _scalars(
    decay: Float[Array, " L"], rate: Float[Array, " L"], divisor: Float[Array, ""] | float
) -> Float[Array, "L 3"]:
    scale = jnp.full_like(rate, 1.0) / divisor
    return jnp.stack([decay, rate, scale], axis=1)


interpreted = functools.partial(adafactor, interpret=True)


def _input_specs(tiles: Tiles, width: int) -> list[pl.BlockSpec]:
    """Returns the block specs of the gradient, the parameter and the momentum."""
    of_layers = ((SUMS,), (SUMS,), (NORM,))
    of_tiles = ((SUMS, NORM, UPDATE), (SUMS, UPDATE), (UPDATE,))
    phases = of_layers if tiles.resident else of_tiles
    widths = width, width, tiles.columns
    return [_spec(tiles, n, *used) for n, used in zip(widths, phases, strict=True)]


def _spec(tiles: Tiles, width: int, *phases: int) -> pl.BlockSpec:
    """Returns the block spec of an array whose tiles are used only in `phases`.

    In the other phases, the spec names the tile that the next of these phases begins with, or the
    last tile if there is none, so that no tile is read or written in vain. If `width`, the number
    of columns of the array, is that of a head, the array has a row for each row and head.
    """
    rows = tiles.tile * tiles.columns // width

    def index(layer: Int[Array, ""], phase: Int[Array, ""], tile: Int[Array, ""]) -> tuple:
        place = jnp.where(phase > phases[-1], tiles.count - 1, 0)
        for used in phases:
            place = jnp.where(phase == used, tile, place)
        return layer, place, 0

    return pl.BlockSpec((None, rows, width), index)


def _scratch(tiles: Tiles) -> list[Any]:
    layer = (tiles.count, tiles.tile, tiles.columns)
    sums = [(_SUBLANES, tiles.columns)] * 3
    shapes = [layer[:2], (1, tiles.columns), *sums, *[layer] * 3 * tiles.resident]
    return [pltpu.VMEM(shape, jnp.float32) for shape in shapes]
