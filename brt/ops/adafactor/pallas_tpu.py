"""Adafactor's update on TPUs in one kernel: one layer of a stack after the other, in three phases.

A step of the grid is a tile of R rows in one phase of one layer. The phases of a layer are

    0  sums of the squared gradients over rows and columns, and of the squared parameters
    1  sums of the squared updates, for which the second moments of all rows and columns are needed
    2  new momentum and parameters, for which the root mean squares of the whole layer are needed

A layer is resident if its gradients, parameters and momentum fit into on-chip memory (VMEM). Phases
0 and 1 then copy these arrays to scratch memory, and each array is read from HBM once. If a layer
is not resident, gradients are read in all phases, and parameters in phases 0 and 2.

A layer is a matrix of the stack. In shapes, L is the number of layers, A the number of a layer's
rows, B the number of its columns, T the number of its tiles (A = T R), and C the number of columns
of a chunk (`Tiles.chunk`). If the columns are split into heads, H is the number of heads, and K the
number of columns of a head.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from brt.distributed import rules
from brt.ops.adafactor.xla import EPSILON, MOMENTUM, SMALLEST_SCALE, Moments, Updated
from brt.ops.tpu import LANES, VMEM_BYTES, vmem_budget, vmem_refusal

SUMS, NORM, UPDATE = range(3)  # The phases.
_SUBLANES = 8
_CHUNK = 16 * _SUBLANES * LANES  # The kernel computes at most this many numbers at a time.
_MOST_ROWS = 128  # A tile has at most this many rows.
# The largest and the smallest size of a tile, in bytes. With a smaller tile, the computation of a
# grid step would take less time than the start of the step.
_LARGEST, _SMALLEST = 2**20, 2**17


class Tiles(NamedTuple):
    """The division of a stack of matrices [L, A, B] into tiles."""

    # The next three are the sizes L, A and B of the stack.
    layers: int
    rows: int
    columns: int
    # The number of heads H if gradients and parameters are [L, A H, K], with B = H K; 1 if they are
    # [L, A, B].
    heads: int
    # R, the number of rows of a tile.
    tile: int
    # True if a layer stays in VMEM through all phases.
    resident: bool

    @property
    def count(self) -> int:
        """The number of tiles of a layer."""
        return self.rows // self.tile

    @property
    def chunk(self) -> int:
        """The number of columns computed at a time: K with heads, else a multiple of 128."""
        if self.heads > 1:
            return self.columns // self.heads
        blocks, limit = self.columns // LANES, max(1, _CHUNK // (self.tile * LANES))
        return LANES * max(n for n in range(1, limit + 1) if blocks % n == 0)


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
    limit = min(_MOST_ROWS, max(_SUBLANES, _LARGEST // (4 * columns)))
    sizes = [n for n in range(_SUBLANES, limit + 1, _SUBLANES) if rows % n == 0][::-1]
    of_layers = [Tiles(layers, rows, columns, heads, size, True) for size in sizes]
    large = (tiles for tiles in of_layers if 4 * tiles.tile * columns >= _SMALLEST)
    resident = next((tiles for tiles in large if _bytes(tiles) <= vmem_budget()), None)
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
    # The number of reads and writes of arrays that are as large as the parameter.
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

    In each of the other phases, the spec names a single tile, so that no tile is read or written in
    vain. This is the tile with which the next of `phases` begins, or the last tile if there is no
    next one. `width` is the number of columns of the array. It is B, or K if the array is stored as
    [A H, K]; in the latter case, a tile has R H rows.
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


class Scratch(NamedTuple):
    """Memory that lasts through the phases of a layer."""

    # [T, R]: in phase 0, each row's sum of squared gradients; in later phases, the factor of each
    # row. The update is the gradient times the factors of rows and columns.
    row_factors: Any
    # [1, B]: the factor of each column.
    column_factors: Any
    # The next three are [8, B]: partial sums over rows of the squares of gradients, of parameters
    # and of updates.
    column_sums: Any
    parameter_sums: Any
    update_sums: Any
    # The next three are [T, R, B]: the layer's gradient, parameter and momentum if the layer is
    # resident, else None.
    gradient: Any = None
    parameter: Any = None
    momentum: Any = None


def kernel(
    scalars: Any, gradient: Any, parameter: Any, momentum: Any, rows: Any, columns: Any,
    new_parameter: Any, new_momentum: Any, new_rows: Any, new_columns: Any, squares: Any,
    *scratch: Any, tiles: Tiles, factor: float,
) -> None:  # fmt: skip
    """Computes one tile in one phase; `scratch` has the arrays of `Scratch`.

    Args:
      scalars: [L, 3]: for each layer, the decay of the second moments, the learning rate, and the
        factor of the gradients.
      gradient, parameter: a tile [R, B], or [R H, K] with heads.
      momentum: a tile [R, B].
      rows, columns: moving averages of squared gradients (`Moments`) of the layer's T R rows, as
        [T, R], and of its B columns, as [1, B].
      squares: [1, 128], an output: the sum of the layer's squared gradients, 128 times.
      factor: as in `api.adafactor`.
    """
    layer, phase, tile = (pl.program_id(axis) for axis in range(3))
    held = Scratch(*scratch)
    decay, rate, scale = (scalars[layer, i] for i in range(3))

    @pl.when(phase == SUMS)
    def _sums() -> None:
        _add_squares(gradient, parameter, held, scale, tile, tiles)

    @pl.when((phase == NORM) & (tile == 0))
    def _factors() -> None:
        total = jnp.sum(held.row_factors[...], keepdims=True)
        squares[...] = jnp.broadcast_to(total, squares.shape)
        _new_moments(rows, columns, new_rows, new_columns, held, decay, tiles)

    @pl.when(phase == NORM)
    def _norm() -> None:
        _add_squared_updates(gradient, momentum, held, scale, tile, tiles)

    @pl.when((phase == UPDATE) & (tile == 0))
    def _scale() -> None:
        _scale_factors(held, rate, tiles)

    @pl.when(phase == UPDATE)
    def _update() -> None:
        arrays = gradient, parameter, momentum, new_parameter, new_momentum
        _write(*arrays, held, scale, tile, tiles, factor)


def _add_squares(
    gradient: Any, parameter: Any, held: Scratch, scale: Array, tile: Array, tiles: Tiles
) -> None:
    """Adds the squares of a tile's gradients and parameters to the sums in `held`.

    If the layer is resident, the tile is also kept in `held`.
    """

    @pl.when(tile == 0)
    def _start() -> None:
        for sums in (held.column_sums, held.parameter_sums, held.update_sums):
            sums[...] = jnp.zeros_like(sums)

    by_lane = jnp.zeros((tiles.tile, LANES), jnp.float32)
    for at in _chunks(tiles):
        g, p = scale * _load(gradient, at, tiles), _load(parameter, at, tiles)
        square = g * g
        held.column_sums[:, at] += _over_registers(square)
        held.parameter_sums[:, at] += _over_registers(p * p)
        by_lane += sum(jnp.split(square, square.shape[1] // LANES, axis=1))
        if tiles.resident:
            held.gradient[tile, :, at] = g
            held.parameter[tile, :, at] = p
    held.row_factors[pl.ds(tile, 1)] = jnp.sum(by_lane.T, axis=0, keepdims=True)


def _new_moments(
    rows: Any, columns: Any, new_rows: Any, new_columns: Any, held: Scratch, decay: Array,
    tiles: Tiles,
) -> None:  # fmt: skip
    """Computes the second moments of a layer and the factors of its rows and columns."""
    of_row = held.row_factors[...] / tiles.columns + EPSILON
    of_column = jnp.sum(held.column_sums[...], axis=0, keepdims=True) / tiles.rows + EPSILON
    of_row = decay * rows[...] + (1 - decay) * of_row
    of_column = decay * columns[...] + (1 - decay) * of_column
    new_rows[...], new_columns[...] = of_row, of_column
    # optax divides the shorter of the two vectors by its mean.
    if tiles.rows <= tiles.columns:
        of_row /= jnp.sum(of_row, keepdims=True) / tiles.rows
    else:
        of_column /= jnp.sum(of_column, keepdims=True) / tiles.columns
    held.row_factors[...] = jax.lax.rsqrt(of_row)
    held.column_factors[...] = jax.lax.rsqrt(of_column)


def _add_squared_updates(
    gradient: Any, momentum: Any, held: Scratch, scale: Array, tile: Array, tiles: Tiles
) -> None:
    """Adds the squares of the updates of a tile to `held.update_sums`.

    These updates are not yet multiplied by the factors of columns. If the layer is resident, the
    tile's momentum is also kept in `held.momentum`.
    """
    factor = _row_factors(held, tile, tiles)
    for at in _chunks(tiles):
        update = _gradient(gradient, held, scale, tile, at, tiles) * factor
        held.update_sums[:, at] += _over_registers(update * update)
        if tiles.resident:
            held.momentum[tile, :, at] = momentum[:, at]


def _scale_factors(held: Scratch, rate: Array, tiles: Tiles) -> None:
    """Multiplies the factors of columns by the scale of the update.

    The scale depends on the root mean squares of the update and of the parameter.
    """
    size, factors = tiles.rows * tiles.columns, held.column_factors[...]
    norm = jnp.sqrt(jnp.sum(held.update_sums[...] * (factors * factors), keepdims=True) / size)
    scale = jnp.sqrt(jnp.sum(held.parameter_sums[...], keepdims=True) / size)
    scale = jnp.maximum(scale, SMALLEST_SCALE) / jnp.maximum(norm, 1.0)
    held.column_factors[...] = factors * ((1 - MOMENTUM) * rate * scale)


def _write(
    gradient: Any, parameter: Any, momentum: Any, new_parameter: Any, new_momentum: Any,
    held: Scratch, scale: Array, tile: Array, tiles: Tiles, factor: float,
) -> None:  # fmt: skip
    of_row = _row_factors(held, tile, tiles)
    for at in _chunks(tiles):
        g = _gradient(gradient, held, scale, tile, at, tiles)
        p = held.parameter[tile, :, at] if tiles.resident else _load(parameter, at, tiles)
        m = held.momentum[tile, :, at] if tiles.resident else momentum[:, at]
        m = MOMENTUM * m + g * of_row * held.column_factors[:, at]
        new_momentum[:, at] = m
        new_parameter[_chunk_index(at, tiles)] = p - (m if factor == 1 else factor * m)


def _chunks(tiles: Tiles) -> list[Any]:
    return [pl.ds(start, tiles.chunk) for start in range(0, tiles.columns, tiles.chunk)]


def _chunk_index(at: Any, tiles: Tiles) -> tuple[Any, Any]:
    """Returns the indices of a chunk of columns in a tile of gradients or parameters."""
    if tiles.heads == 1:
        return slice(None), at
    return pl.ds(at.start // at.size, tiles.tile, stride=tiles.heads), slice(None)


def _load(ref: Any, at: Any, tiles: Tiles) -> Float[Array, "R C"]:
    return ref[_chunk_index(at, tiles)]


def _gradient(
    gradient: Any, held: Scratch, scale: Array, tile: Array, at: Any, tiles: Tiles
) -> Float[Array, "R C"]:
    return held.gradient[tile, :, at] if tiles.resident else scale * _load(gradient, at, tiles)


def _row_factors(held: Scratch, tile: Array, tiles: Tiles) -> Float[Array, "R 1"]:
    row = held.row_factors[pl.ds(tile, 1)]
    return jnp.broadcast_to(row, (LANES, tiles.tile)).T[:, :1]


def _over_registers(x: Float[Array, "R C"]) -> Float[Array, "8 C"]:
    """Returns the sums over rows whose indices are equal modulo 8.

    Such sums add whole vector registers of 8 rows.
    """
    return jnp.sum(x.reshape(-1, _SUBLANES, x.shape[1]), axis=0)
