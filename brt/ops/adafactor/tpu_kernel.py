"""The kernel of Adafactor's update on TPUs: one layer of a stack after the other, in three phases.

A step of the grid is a tile of R rows in one phase of one layer. The phases of a layer are

    0  sums of the squared gradients over rows and columns, and of the squared parameters
    1  sums of the squared updates, for which the second moments of all rows and columns are needed
    2  new momentum and parameters, for which the root mean squares of the whole layer are needed

If a layer is resident, phases 0 and 1 copy its gradients, parameters and momentum to scratch
memory, and each array is read from HBM once. Otherwise gradients are read in all phases, and
parameters in phases 0 and 2.

In shapes, A is the number of rows of a layer, B of columns, and T of tiles, so that A = T R.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from brt.ops.adafactor.reference import EPSILON, MOMENTUM, SMALLEST_SCALE
from brt.ops.tpu import LANES

SUMS, NORM, UPDATE = range(3)  # The phases.
_SUBLANES = 8
_CHUNK = 16 * _SUBLANES * LANES  # The kernel computes at most this many numbers at a time.


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
        """The number of columns computed at a time: a multiple of 128, or those of a head."""
        if self.heads > 1:
            return self.columns // self.heads
        blocks, most = self.columns // LANES, max(1, _CHUNK // (self.tile * LANES))
        return LANES * max(n for n in range(1, most + 1) if blocks % n == 0)


class Scratch(NamedTuple):
    """Memory that lasts through the phases of a layer."""

    # [T, R], sums of squared gradients, and then factors of the update.
    row_factors: Any
    # [1, B], factors of the update.
    column_factors: Any
    # The next three are [8, B]: partial sums of squares over rows.
    column_sums: Any
    parameter_sums: Any
    update_sums: Any
    # The next three are [T, R, B]: the layer if it is resident, else None.
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
      scalars: [L, 3], decay of the second moments, learning rate, and factor of the gradients, of
        each layer.
      gradient, parameter: a tile [R, B], or [R H, K] with heads.
      momentum: a tile [R, B].
      rows, columns: the layer's means of squared gradients of each row [T, R] and column [1, B].
      squares: [1, 128], the result for the sum of the layer's squared gradients, 128 times.
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
    """Adds the squares of a tile's gradients and parameters to the sums, and keeps the tile of a
    resident layer.
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
    """Computes the second moments of a layer, and the factors of rows and columns.

    The update is the product of the gradient and of both factors.
    """
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
    """Adds the squares of a tile's updates, without the factors of columns, to the sums."""
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
        new_parameter[_places(at, tiles)] = p - (m if factor == 1 else factor * m)


def _chunks(tiles: Tiles) -> list[Any]:
    return [pl.ds(start, tiles.chunk) for start in range(0, tiles.columns, tiles.chunk)]


def _places(at: Any, tiles: Tiles) -> tuple[Any, Any]:
    """Returns the indices of a chunk of columns in a tile of gradients or parameters."""
    if tiles.heads == 1:
        return slice(None), at
    return pl.ds(at.start // at.size, tiles.tile, stride=tiles.heads), slice(None)


def _load(ref: Any, at: Any, tiles: Tiles) -> Float[Array, "R C"]:
    return ref[_places(at, tiles)]


def _gradient(
    gradient: Any, held: Scratch, scale: Array, tile: Array, at: Any, tiles: Tiles
) -> Float[Array, "R C"]:
    return held.gradient[tile, :, at] if tiles.resident else scale * _load(gradient, at, tiles)


def _row_factors(held: Scratch, tile: Array, tiles: Tiles) -> Float[Array, "R 1"]:
    row = held.row_factors[pl.ds(tile, 1)]
    return jnp.broadcast_to(row, (LANES, tiles.tile)).T[:, :1]


def _over_registers(x: Float[Array, "R C"]) -> Float[Array, "8 C"]:
    """Returns the sum of every eighth row, which adds up vector registers."""
    return jnp.sum(x.reshape(-1, _SUBLANES, x.shape[1]), axis=0)
