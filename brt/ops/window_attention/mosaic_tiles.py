"""Building blocks of `mosaic_kernels`: tiles in the memories of a Hopper GPU, copies and products.

A tile has 64 rows (`TILE`), and a warpgroup of 128 threads computes with it. The tensor memory
accelerator (TMA) copies tiles to shared memory while the warpgroup computes with other tiles. A
copy signals its end by arriving at a barrier. Only copies arrive at a barrier, and the warpgroup
that starts a copy also waits for it, so no deadlock is possible.

Only this module imports names of Mosaic GPU. If a version of jax lacks one of the names, importing
this module raises an ImportError, and the kernels are then refused as not available.

A tile of vectors, such as keys, is split into parts of at most 128 columns (`vector_parts`). In
shapes, R and C are the numbers of rows and columns of a tile, usually 64, and P is the number of
columns of a part.
"""

from collections.abc import Callable
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
    commit_smem,
    copy_gmem_to_smem,
    copy_smem_to_gmem,
    kernel,
    layout_cast,
    wait_smem_to_gmem,
    wgmma,
    wgmma_wait,
)
from jaxtyping import Array, Float

from brt.ops.window_attention.mosaic_inputs import (
    TILE,
    WindowMosaicInputs,
    opaque_zero,
    vector_parts,
)

# The last axis of the grid varies fastest. Programs that run one after another are therefore for
# neighbouring tiles of one head, whose windows share keys, so that caches serve many of the reads.
_AXES = ("lane", "head", "tile")
_SWIZZLE = 128  # Matrix products read shared memory in a swizzling pattern of this many bytes.
_OPTIONS = {"approx_math": True, "reduction_scratch_bytes": 0}
if _unknown := [name for name in _OPTIONS if not hasattr(CompilerParams, name)]:
    raise ImportError(f"CompilerParams has no {', '.join(_unknown)}")
# This module sets the layouts of arrays in registers explicitly, which requires the lowering
# semantics `Lane`. By default, jax 0.11 infers the layouts.
_PARAMS = CompilerParams(**_OPTIONS, lowering_semantics=LoweringSemantics.Lane)


def program_place() -> tuple[Array, Array, Array]:
    """Returns the position of the program in the grid.

    The three results are the indices of the lane (row of the batch), the head and the tile. If the
    grid has groups of query tiles instead of lanes, the first result is the index of the group.
    """
    lane, head, tile = (jax.lax.axis_index(name) for name in _AXES)
    return lane, head, tile


# The following functions are about tiles in shared memory. The tiles have the layout in which
# matrix products read them.


def _tiling(itemsize: int) -> tuple[Any, ...]:
    """Returns the transforms of a tile whose elements have this many bytes."""
    # mypy considers both classes abstract and would refuse direct calls.
    tiling: Any = TilingTransform
    swizzle: Any = SwizzleTransform
    return tiling((8, _SWIZZLE // itemsize)), swizzle(_SWIZZLE)


def vector_tiles(x: Array, slots: int) -> Any:
    """Returns shared memory for `slots` tiles of the vectors in x [..., K].

    The shape is [slots, parts, TILE, columns of a part].
    """
    parts = vector_parts(x)
    shape = (slots, parts, TILE, x.shape[-1] // parts)
    return SMEM(shape, x.dtype, transforms=_tiling(x.dtype.itemsize))


def square_tiles(slots: int) -> Any:
    """Returns shared memory for `slots` square tiles [TILE, TILE] of float32 numbers, such as
    biases between queries and keys.
    """
    return SMEM((slots, TILE, TILE), jnp.float32, transforms=_tiling(4))


def row_numbers(slots: int) -> Any:
    """Returns shared memory [slots, 2, TILE] for `slots` tiles of the array
    `WindowMosaicInputs.sums`, which has two numbers for each query of a tile.
    """
    return SMEM((slots, 2, TILE), jnp.float32)


def barrier(copies: int, slots: int = 1) -> Any:
    """Returns a barrier for each of `slots` slots; a barrier opens after `copies` copies have
    arrived.
    """
    return Barrier(num_arrivals=copies, num_barriers=slots)


def copy_vectors(array: Any, place: tuple[Array, ...], to: Any, arrived: Any) -> None:
    """Starts the copies of a tile of vectors from an array [B, T, H, K] to shared memory, one copy
    for each part of the vectors' columns.

    Args:
      array: the array in global memory.
      place: the indices of the lane, the tile and the head.
      to: shared memory for one tile of vectors.
      arrived: the barrier at which the copies arrive.
    """
    lane, tile, head = place
    parts, _, width = to.shape
    for part in range(parts):
        source = array.at[lane, pl.ds(tile * TILE, TILE), head, pl.ds(part * width, width)]
        copy_gmem_to_smem(source, to.at[part], arrived)


def copy_square(array: Any, head: Array, row: Any, column: Array, to: Any, arrived: Any) -> None:
    """Starts the copy of a square tile of an array [H, X, Y] to shared memory.

    Args:
      array: the array in global memory, such as the strip, with a matrix [X, Y] for each head.
      head: the index along H.
      row: the index of the tile along X, counted in tiles.
      column: the index of the tile along Y, counted in tiles.
      to: shared memory for one tile.
      arrived: the barrier at which the copy arrives.
    """
    source = array.at[head, pl.ds(row * TILE, TILE), pl.ds(column * TILE, TILE)]
    copy_gmem_to_smem(source, to, arrived)


def copy_factors(
    inputs: WindowMosaicInputs,
    head: Array,
    row: Array,
    column: Array,
    to: Any,
    slot: Any,
    arrived: Any,
) -> None:
    """Starts the copy of the dropout factors of a query tile and a key tile to a slot, if there is
    dropout.

    Args:
      inputs: the inputs of the kernel.
      head: the index of the head.
      row, column: the indices of the query tile and of the key tile. If `inputs.dropout` is
        transposed, the index of the key tile comes first.
      to: shared memory with slots for square tiles; None without dropout.
      slot: the index of the slot.
      arrived: the barrier at which the copy arrives.
    """
    if to is not None:
        row, column = (jax.lax.rem(tile, inputs.tiles_per_window) for tile in (row, column))
        copy_square(inputs.dropout, head, row, column, to.at[slot], arrived)


def copy_numbers(sums: Any, place: tuple[Array, ...], to: Any, arrived: Any) -> None:
    """Starts the copy of the two numbers that the array `WindowMosaicInputs.sums` has for each
    query of a tile, to shared memory.

    Args:
      sums: the array [B, H, 2, T] in global memory.
      place: the indices of the lane, the tile and the head.
      to: shared memory [2, TILE] for the numbers.
      arrived: the barrier at which the copy arrives.
    """
    lane, tile, head = place
    copy_gmem_to_smem(sums.at[lane, head, :, pl.ds(tile * TILE, TILE)], to, arrived)


def write_vectors(
    parts: list[Array], through: Any, to: Any, place: tuple[Array, ...], first: Any = 0
) -> None:
    """Writes the vectors of a tile, or some of their columns, to an array [B, T, H, K] in global
    memory.

    Args:
      parts: consecutive parts of the vectors' columns.
      through: shared memory to which the parts are written first, because TMA copies only from
        there.
      to: the array.
      place: the indices of the lane, the tile and the head.
      first: the index of the first of these parts among all parts of a vector.
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


def write_square(square: Array, through: Any, to: Any, place: tuple[Array, ...]) -> None:
    """Writes a square tile to an array [G, H, TILE, X] in global memory.

    The array has a strip of X columns for each of G groups of query tiles and each of H heads.

    Args:
      square: the numbers of the tile.
      through: shared memory to which the tile is written first, because TMA copies only from there.
      to: the array.
      place: the indices of the group, of the head, and of the tile along X.
    """
    group, head, column = place
    through[...] = square
    commit_smem()
    copy_smem_to_gmem(through, to.at[group, head, :, pl.ds(column * TILE, TILE)])
    wait_smem_to_gmem(0)


class CopyRing(NamedTuple):
    """A ring of slots in shared memory for the copies of a loop: with S slots, step n of the loop
    reads slot n modulo S.

    Attributes:
      arrived: a barrier for each slot.
      copy: a function that starts the copies for step n. Its arguments are n, the slot and the
        slot's barrier.
    """

    arrived: Any
    copy: Callable[[Any, Any, Any], None]

    def run_steps(self, count: Any, step: Callable[[Array, Array, Any], Any], carry: Any) -> Any:
        """Returns the final carry of `carry = step(n, slot, carry)` for n = 0 ... count - 1.

        A step begins after its copies have arrived in the slot, while the copies of later steps are
        under way.

        Args:
          count: the number of steps.
          step: the function that computes step n; `slot` is the index of the step's slot.
          carry: the initial carry.
        """
        slots = self.arrived.shape[0]

        def start_copies(n: Any, slot: Any) -> None:
            """Starts the copies for step n to a slot, if there is a step n."""
            pl.when(n < count)(lambda: self.copy(n, slot, self.arrived.at[slot]))

        def run_step(n: Array, carry: Any) -> Any:
            """Waits for the copies of step n, runs the step, starts the copies for a later step to
            the slot of step n, which is then free again, and returns the carry after step n.
            """
            slot = jax.lax.rem(n, slots) if slots > 1 else opaque_zero(n)
            barrier_wait(self.arrived.at[slot])
            carry = step(n, slot, carry)
            # The matrix products that read the slot must have ended before the slot is overwritten.
            wgmma_wait(0)
            start_copies(n + slots, slot)
            return carry

        for n in range(slots):
            start_copies(n, n)
        return jax.lax.fori_loop(0, count, run_step, carry)


# The following functions are about arrays in registers. The arrays have the layout of the result of
# a matrix product.


def tile_product(a: Any, b: Any) -> Float[Array, "R C"]:
    """Returns the dot product of each vector r of a and each vector c of b, float32.

    `a` and `b` are tiles of vectors in shared memory, [parts, TILE, numbers of a part].
    """

    def multiply(total: Any) -> Array:
        """Adds the matrix products of all parts of the vectors to the accumulator `total`, and
        returns the accumulator's value.
        """
        for part in range(a.shape[0]):
            wgmma(total, a.at[part], b.at[part].T)
        return total[...]

    return pl.run_scoped(multiply, ACC((TILE, TILE), jnp.float32))


def accumulate(
    count: int, width: int, computation: Callable[..., Any]
) -> tuple[list[Float[Array, "R P"]], Any]:
    """Runs a computation that adds up matrix products in accumulators (registers).

    Args:
      count: the number of accumulators, which are zero at first.
      width: the number of columns of an accumulator.
      computation: the computation; its arguments are references to the accumulators.

    Returns:
      The values of the accumulators after the computation, and the result of `computation`.
    """

    def run_and_read(*totals: Any) -> tuple[list[Array], Any]:
        """Returns the values of the accumulators `totals` after `computation`, and its result."""
        result = computation(*totals)
        return [total[...] for total in totals], result

    return pl.run_scoped(run_and_read, *[ACC((TILE, width), jnp.float32)] * count)


def constant(value: float, *shape: int) -> Array:
    """Returns a float32 array whose numbers are all `value`.

    Args:
      value: the number.
      shape: (rows, columns) for a tile, or (rows,) for an array with a number for each row of a
        tile.
    """
    layout = Layout.WGMMA if len(shape) == 2 else Layout.WGMMA.reduce(1)
    return layout_cast(jnp.full(shape, value, jnp.float32), layout)


def broadcast_rows(x: Array, columns: int = TILE) -> Float[Array, "R C"]:
    """Returns an array whose row r has the number x[r] in all `columns` columns; x is [TILE]."""
    return jax.lax.broadcast_in_dim(x, (TILE, columns), [0])


def read_by_row(ref: Any) -> Float[Array, "R C"]:
    """Returns a square array whose row r has the r-th number of `ref` in all columns.

    `ref` is a reference to TILE numbers in shared memory.
    """
    return broadcast_rows(layout_cast(ref[...], Layout.WGMMA.reduce(1)))


def read_by_column(ref: Any) -> Float[Array, "R C"]:
    """Returns a square array whose column c has the c-th number of `ref` in all rows.

    `ref` is a reference to TILE numbers in shared memory.
    """
    columns = layout_cast(ref[...], Layout.WGMMA.reduce(0))
    return jax.lax.broadcast_in_dim(columns, (TILE, TILE), [1])


def call(
    function: Callable[..., None],
    inputs: WindowMosaicInputs,
    outputs: list[jax.ShapeDtypeStruct],
    grid: tuple[int, int, int],
    interpret: Any,
    scratch: dict[str, Any],
    **options: Any,
) -> list[Array]:
    """Runs a kernel and returns its outputs.

    Args:
      function: the body of the kernel; its arguments are the inputs, the outputs, and by name the
        shared memory and `options`.
      inputs: the inputs of the kernel.
      outputs: the shapes and dtypes of the outputs.
      grid: the number of programs along the axes of lanes (or parts of lanes), heads and tiles.
      interpret: None runs the kernel on the GPU; another value is passed to Pallas as its argument
        `interpret`, to run the kernel without a GPU.
      scratch: the shared memory and the barriers, by name.
      options: static arguments of the body.
    """
    arguments = [x for x in inputs if x is not None]

    def call_with_names(*refs: Any) -> None:
        """Calls `function` with the references `refs` to the inputs, the outputs and the shared
        memory.

        The inputs are passed as a `WindowMosaicInputs`, and the shared memory by name.
        """
        remaining = iter(refs)
        references = WindowMosaicInputs(*(None if x is None else next(remaining) for x in inputs))
        results = [next(remaining) for _ in outputs]
        function(references, *results, **dict(zip(scratch, remaining, strict=True)), **options)

    return kernel(
        call_with_names, out_type=outputs, grid=grid, grid_names=_AXES,
        scratch_types=list(scratch.values()), kernel_name=function.__name__, interpret=interpret,
        compiler_params=_PARAMS,
    )(*arguments)  # fmt: skip
