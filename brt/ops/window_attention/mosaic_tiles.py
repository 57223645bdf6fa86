"""Building blocks of `mosaic_kernels`: tiles in the memories of a Hopper GPU, copies and products.

A tile has 64 rows (`TILE`), and a warpgroup of 128 threads computes with it. The tensor memory
accelerator (TMA) copies tiles to shared memory while the warpgroup computes with other tiles. A
copy signals its end by arriving at a barrier. Only copies arrive at a barrier, and the warpgroup
that starts a copy also waits for it, so no deadlock is possible.

Only this module imports names of Mosaic GPU. If a version of jax lacks one of them, importing this
module raises an ImportError, and the kernels are then refused as not available.

A tile of vectors, such as keys, is split into parts of at most 128 columns (`vector_parts`). In
shapes, R and C are the numbers of rows and columns of a tile, and P of columns of a part.
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
    """Returns the indices of the row of the batch (or group of query tiles), head and tile."""
    lane, head, tile = (jax.lax.axis_index(name) for name in _AXES)
    return lane, head, tile


# The following functions are about tiles in shared memory, in the layout in which matrix products
# read them. In their arguments, `place` has the indices of the row of the batch, the tile and the
# head; `to` is the destination, and `arrived` the barrier at which the copies arrive.


def _tiling(itemsize: int) -> tuple[Any, ...]:
    # mypy considers both classes abstract and would refuse direct calls.
    tiling: Any = TilingTransform
    swizzle: Any = SwizzleTransform
    return tiling((8, _SWIZZLE // itemsize)), swizzle(_SWIZZLE)


def vector_tiles(x: Array, slots: int) -> Any:
    """Returns shared memory for tiles of the vectors x [..., K], [slots, parts, TILE, P]."""
    parts = vector_parts(x)
    shape = (slots, parts, TILE, x.shape[-1] // parts)
    return SMEM(shape, x.dtype, transforms=_tiling(x.dtype.itemsize))


def square_tiles(slots: int) -> Any:
    """Returns shared memory for float32 tiles, such as biases, [slots, TILE, TILE]."""
    return SMEM((slots, TILE, TILE), jnp.float32, transforms=_tiling(4))


def row_numbers(slots: int) -> Any:
    """Returns shared memory for tiles of `WindowMosaicInputs.sums`, [slots, 2, TILE]."""
    return SMEM((slots, 2, TILE), jnp.float32)


def barrier(copies: int, slots: int = 1) -> Any:
    """Returns a barrier for each slot, which opens after `copies` copies have arrived."""
    return Barrier(num_arrivals=copies, num_barriers=slots)


def copy_vectors(array: Any, place: tuple[Array, ...], to: Any, arrived: Any) -> None:
    """Starts the copies of a tile of an array [B, T, H, K], one for each part of its columns."""
    lane, tile, head = place
    parts, _, width = to.shape
    for part in range(parts):
        source = array.at[lane, pl.ds(tile * TILE, TILE), head, pl.ds(part * width, width)]
        copy_gmem_to_smem(source, to.at[part], arrived)


def copy_square(array: Any, head: Array, row: Any, column: Array, to: Any, arrived: Any) -> None:
    """Starts the copy of tile (row, column) of a head's matrix, from an array [H, X, Y]."""
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
    """Starts the copy of the dropout factors of query tile `row` and key tile `column`, if any.

    If `inputs.dropout` is transposed, `row` is the index of the key tile, and `column` of the query
    tile.
    """
    if to is not None:
        row, column = (jax.lax.rem(tile, inputs.tiles_per_window) for tile in (row, column))
        copy_square(inputs.dropout, head, row, column, to.at[slot], arrived)


def copy_numbers(sums: Any, place: tuple[Array, ...], to: Any, arrived: Any) -> None:
    """Starts the copy of the numbers of a tile's queries in `WindowMosaicInputs.sums`."""
    lane, tile, head = place
    copy_gmem_to_smem(sums.at[lane, head, :, pl.ds(tile * TILE, TILE)], to, arrived)


def write_vectors(
    parts: list[Array], through: Any, to: Any, place: tuple[Array, ...], first: Any = 0
) -> None:
    """Writes consecutive parts of a tile's columns to an array [B, T, H, K] in global memory.

    They are first written to the shared memory `through`, because TMA copies only from there. The
    first of them has the index `first` among all parts of a vector.
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
    """Writes a tile to an array of strips of G groups of query tiles, [G, H, TILE, X].

    `place` has the indices of the group, of the head, and of the tile along X.
    """
    group, head, column = place
    through[...] = square
    commit_smem()
    copy_smem_to_gmem(through, to.at[group, head, :, pl.ds(column * TILE, TILE)])
    wait_smem_to_gmem(0)


class CopyRing(NamedTuple):
    """A ring of S slots in shared memory for the copies of a loop: step n reads slot n modulo S."""

    arrived: Any  # The barriers, one for each slot.
    # The function starts the copies for step n; its arguments are n, the slot's index and barrier.
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


# The following functions are about arrays in registers. The arrays have the layout of the result of
# a matrix product.


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
    """Returns the numbers in `count` accumulators after `computation`, and its result.

    The computation gets references to the accumulators, registers [TILE, width] that are zero at
    first and to which it adds matrix products.
    """

    def run_and_read(*totals: Any) -> tuple[list[Array], Any]:
        result = computation(*totals)
        return [total[...] for total in totals], result

    return pl.run_scoped(run_and_read, *[ACC((TILE, width), jnp.float32)] * count)


def constant(value: float, *shape: int) -> Array:
    """Returns a tile [rows, columns], or a number for each row of a tile, that is all `value`."""
    layout = Layout.WGMMA if len(shape) == 2 else Layout.WGMMA.reduce(1)
    return layout_cast(jnp.full(shape, value, jnp.float32), layout)


def broadcast_rows(x: Array, columns: int = TILE) -> Float[Array, "R C"]:
    """Returns an array whose row r has the number x[r] in all columns; x is [TILE]."""
    return jax.lax.broadcast_in_dim(x, (TILE, columns), [0])


def read_by_row(ref: Any) -> Float[Array, "R C"]:
    """Returns a tile with number r of `ref` (shared memory [TILE]) in all columns of row r."""
    return broadcast_rows(layout_cast(ref[...], Layout.WGMMA.reduce(1)))


def read_by_column(ref: Any) -> Float[Array, "R C"]:
    """Returns a tile with number c of `ref` (shared memory [TILE]) in all rows of column c."""
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
      function: the body, called with inputs, outputs, and by name the `scratch` and `options`.
      scratch: the shared memory and the barriers.
      interpret: None runs the kernel on the GPU; another value is passed to Pallas as its argument
        `interpret`, to run the kernel without a GPU.
    """
    arguments = [x for x in inputs if x is not None]

    def call_with_names(*refs: Any) -> None:
        remaining = iter(refs)
        references = WindowMosaicInputs(*(None if x is None else next(remaining) for x in inputs))
        results = [next(remaining) for _ in outputs]
        function(references, *results, **dict(zip(scratch, remaining, strict=True)), **options)

    return kernel(
        call_with_names, out_type=outputs, grid=grid, grid_names=_AXES,
        scratch_types=list(scratch.values()), kernel_name=function.__name__, interpret=interpret,
        compiler_params=_PARAMS,
    )(*arguments)  # fmt: skip
