"""Building blocks of `gpu_kernels`: tiles in the memories of a Hopper GPU, copies and products.

A tile has 64 rows (`TILE`), and a warpgroup of 128 threads computes with it. The tensor memory
accelerator (TMA) copies tiles to shared memory while the warpgroup computes with other tiles. A
copy signals its end by arriving at a barrier. Only copies arrive at a barrier, and the warpgroup
that starts a copy also waits for it, so no deadlock is possible.

Only this module imports names of Mosaic GPU. If a version of jax lacks one of them, importing this
module raises an ImportError, and the kernels are then refused as not available.

A tile of vectors, such as keys, is split into parts of at most 128 columns (`vector_parts`). A
buffer in shared memory has one or several slots, each with room for a tile. In shapes, R and C are
the numbers of rows and columns of a tile, and P is the number of columns of a part.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas.mosaic_gpu import (
    ACC,
    SMEM,
    Barrier,
    CompilerParams,
    Layout,
    LoweringSemantics,
    SwizzleTransform,
    TilingTransform,
    barrier_wait,
    broadcasted_iota,
    commit_smem,
    copy_gmem_to_smem,
    copy_smem_to_gmem,
    kernel,
    layout_cast,
    wait_smem_to_gmem,
    wgmma,
    wgmma_wait,
)
from jaxtyping import Array, Float, Int, Shaped

from brt.ops.attention.gpu_inputs import TILE, opaque_zero, vector_parts

# The last axis of the grid varies fastest. Programs that run one after another therefore compute
# neighbouring tiles of one head. The windows of these tiles share keys, so caches serve many reads.
_AXES = ("lane", "head", "tile")
_SWIZZLE = 128  # Matrix products read shared memory in a swizzling pattern of this many bytes.
_OPTIONS = {"approx_math": True, "reduction_scratch_bytes": 0}
if _unknown := [name for name in _OPTIONS if not hasattr(CompilerParams, name)]:
    raise ImportError(f"CompilerParams has no {', '.join(_unknown)}")
# This module sets the layouts of arrays in registers explicitly, which requires the lowering
# semantics `Lane`. By default, jax 0.11 infers the layouts.
_PARAMS = CompilerParams(**_OPTIONS, lowering_semantics=LoweringSemantics.Lane)


def program_place() -> tuple[Array, Array, Array]:
    """Returns the index of the row of the batch (or of the group), of the head and of the tile."""
    lane, head, tile = (jax.lax.axis_index(name) for name in _AXES)
    return lane, head, tile


# The following functions are about tiles in shared memory, in the layout in which matrix products
# read them. In their arguments, `to` is the destination, and `arrived` the barrier at which the
# copies arrive. For vectors, `place` is (row of the batch, tile, head), three indices.


def _tiling(itemsize: int) -> tuple[Any, ...]:
    # mypy considers both classes abstract and would refuse calls, unless they have the type Any.
    tiling: Any = TilingTransform
    swizzle: Any = SwizzleTransform
    return tiling((8, _SWIZZLE // itemsize)), swizzle(_SWIZZLE)


def vector_tiles(x: Array, slots: int) -> Any:
    """Returns shared memory [slots, parts, TILE, P] for tiles of the vectors x [..., K].

    The vectors are split into parts of P numbers.
    """
    parts = vector_parts(x)
    shape = (slots, parts, TILE, x.shape[-1] // parts)
    return SMEM(shape, x.dtype, transforms=_tiling(x.dtype.itemsize))


def square_tiles(x: Array, slots: int) -> Any:
    """Returns shared memory [slots, TILE, TILE] for tiles of the A matrices x [A, X, Y]."""
    return SMEM((slots, TILE, TILE), x.dtype, transforms=_tiling(x.dtype.itemsize))


def number_tiles(x: Array, slots: int) -> Any:
    """Returns shared memory [slots, 2, TILE] for tiles of the pairs of numbers x [..., 2, T]."""
    return SMEM((slots, 2, TILE), x.dtype)


def barrier(copies: int, slots: int = 1) -> Any:
    """Returns one barrier for each slot; a barrier opens after `copies` copies have arrived."""
    return Barrier(num_arrivals=copies, num_barriers=slots)


def copy_vectors(array: Any, place: tuple[Any, ...], to: Any, arrived: Any) -> None:
    """Starts the copies of a tile of an array [B, T, H, K], one copy for each part of columns."""
    lane, tile, head = place
    parts, _, width = to.shape
    for part in range(parts):
        source = array.at[lane, pl.ds(tile * TILE, TILE), head, pl.ds(part * width, width)]
        copy_gmem_to_smem(source, to.at[part], arrived)


def copy_square(array: Any, index: Any, row: Any, column: Any, to: Any, arrived: Any) -> None:
    """Starts the copy of tile [row, column] of the matrix array[index]; `array` is [A, X, Y]."""
    source = array.at[index, pl.ds(row * TILE, TILE), pl.ds(column * TILE, TILE)]
    copy_gmem_to_smem(source, to, arrived)


def copy_numbers(array: Any, place: tuple[Any, ...], tile: Any, to: Any, arrived: Any) -> None:
    """Starts the copy of a tile of array[place] [2, T], which has two numbers per query or key."""
    copy_gmem_to_smem(array.at[*place, :, pl.ds(tile * TILE, TILE)], to, arrived)


def write_vectors(
    parts: list[Array], through: Any, to: Any, place: tuple[Any, ...], first: Any = 0
) -> None:
    """Writes consecutive parts of a tile's columns to an array [B, T, H, K] in global memory.

    The parts pass through the shared memory `through`, because TMA copies only from there to global
    memory. `first` is the index of parts[0] among all parts of a vector.
    """
    lane, tile, head = place
    width = through.shape[2]
    for n, part in enumerate(parts):
        through[n] = part.astype(through.dtype)
    commit_smem()
    for n in range(len(parts)):
        columns = pl.ds((first + n) * width, width)
        destination = to.at[lane, pl.ds(tile * TILE, TILE), head, columns]
        copy_smem_to_gmem(through.at[n], destination)
    wait_smem_to_gmem(0)


def write_square(square: Array, through: Any, to: Any, place: tuple[Any, ...]) -> None:
    """Writes a tile to an array of matrices [N, A, X, Y].

    `place` has the two indices of the matrix, and the row and column of the tile.
    """
    group, index, row, column = place
    through[...] = square
    commit_smem()
    matrix = to.at[group, index, pl.ds(row * TILE, TILE), pl.ds(column * TILE, TILE)]
    copy_smem_to_gmem(through, matrix)
    wait_smem_to_gmem(0)


class CopyRing(NamedTuple):
    """A ring of S slots in shared memory for the copies of a loop: step n reads slot n modulo S."""

    arrived: Any  # The barriers, one for each slot.
    # A function that starts the copies for step n, with the arguments n, the index of the slot, and
    # the slot's barrier.
    copy: Callable[[Any, Any, Any], None]

    def run_steps(self, count: Any, step: Callable[[Array, Array, Any], Any], carry: Any) -> Any:
        """Returns the final carry of `carry = step(n, slot, carry)` for n = 0 ... count - 1.

        A step begins after its copies have arrived in the slot with the index `slot`, while the
        copies of later steps are under way.
        """
        slots = self.arrived.shape[0]

        def start_copies(n: Any, slot: Any) -> None:
            pl.when(n < count)(lambda: self.copy(n, slot, self.arrived.at[slot]))

        def run_step(n: Array, carry: Any) -> Any:
            slot = jax.lax.rem(n, slots) if slots > 1 else opaque_zero(n)
            barrier_wait(self.arrived.at[slot])
            carry = step(n, slot, carry)
            # The matrix products that read the slot must have ended before copies for a later step
            # overwrite it.
            wgmma_wait(0)
            start_copies(n + slots, slot)
            return carry

        for n in range(slots):
            start_copies(n, n)
        return jax.lax.fori_loop(0, count, run_step, carry)


# The following functions take or return arrays in registers, which have the layout of a matrix
# product's result.


def tile_product(a: Any, b: Any) -> Float[Array, "R C"]:
    """Returns the dot product of each vector r of a and each vector c of b, float32.

    `a` and `b` are tiles of vectors in shared memory, [parts, TILE, P].
    """

    def multiply(total: Any) -> Array:
        for part in range(a.shape[0]):
            wgmma(total, a.at[part], b.at[part].T)
        return total[...]

    return pl.run_scoped(multiply, ACC((TILE, TILE), jnp.float32))


def accumulate(
    count: int, width: int, computation: Callable[..., Any]
) -> tuple[list[Float[Array, "R P"]], Any]:
    """Runs `computation` with `count` accumulators; returns their final numbers and its result.

    The computation gets references to the accumulators, which are registers [TILE, width]. The
    accumulators are zero at first, and the computation adds matrix products to them.
    """

    def run_and_read(*totals: Any) -> tuple[list[Array], Any]:
        result = computation(*totals)
        return [total[...] for total in totals], result

    return pl.run_scoped(run_and_read, *[ACC((TILE, width), jnp.float32)] * count)


def constant(value: float, *shape: int) -> Array:
    """Returns a tile [rows, columns], or an array with a number per row, filled with `value`."""
    layout = Layout.WGMMA if len(shape) == 2 else Layout.WGMMA.reduce(1)
    return layout_cast(jnp.full(shape, value, jnp.float32), layout)


def broadcast_rows(x: Array, columns: int = TILE) -> Shaped[Array, "R C"]:
    """Returns an array whose row r has the number x[r] in all columns; x is [TILE]."""
    return jax.lax.broadcast_in_dim(x, (TILE, columns), [0])


def read_numbers(ref: Any) -> Shaped[Array, " R"]:
    """Returns the numbers in `ref` (shared memory [TILE]), one per row of a tile, in registers."""
    return layout_cast(ref[...], Layout.WGMMA.reduce(1))


def read_by_row(ref: Any) -> Shaped[Array, "R C"]:
    """Returns a tile with number r of `ref` (shared memory [TILE]) in all columns of row r."""
    return broadcast_rows(read_numbers(ref))


def read_by_column(ref: Any) -> Shaped[Array, "R C"]:
    """Returns a tile with number c of `ref` (shared memory [TILE]) in all rows of column c."""
    columns = layout_cast(ref[...], Layout.WGMMA.reduce(0))
    return jax.lax.broadcast_in_dim(columns, (TILE, TILE), [1])


def tile_places(axis: int) -> Int[Array, "R C"]:
    """Returns a tile in which each entry is its own index on `axis`."""
    return broadcasted_iota(jnp.int32, (TILE, TILE), axis, layout=Layout.WGMMA)


def run(
    body: Callable[..., None], name: str, inputs: Sequence[Array],
    outputs: list[jax.ShapeDtypeStruct], grid: tuple[int, int, int], scratch: list[Any],
    interpret: Any,
) -> list[Array]:  # fmt: skip
    """Runs a kernel and returns its outputs.

    Args:
      body: is called with references to inputs, outputs and scratch.
      grid: the numbers of rows of the batch (or groups), of heads, and of tiles.
      scratch: the shared memory and the barriers.
      interpret: None runs the kernel on the GPU; another value is passed to Pallas as its argument
        `interpret`, to run the kernel without a GPU.
    """
    return kernel(
        body, out_type=outputs, grid=grid, grid_names=_AXES, scratch_types=scratch,
        kernel_name=name, interpret=interpret, compiler_params=_PARAMS,
    )(*inputs)  # fmt: skip
