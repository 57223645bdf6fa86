"""Building blocks of `mosaic_kernels`: tiles in the memories of a Hopper GPU, copies and products.

The tensor memory accelerator (TMA) copies tiles to shared memory while the warpgroup computes with
other tiles. Only copies arrive at a barrier, and the warpgroup that starts a copy also waits for
it, so no deadlock is possible.

This module imports all names of Mosaic GPU. If a version of jax lacks one of them, the ImportError
says that the kernels are not available; no other error does.
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

# The last axis varies fastest, so neighbouring programs read the same keys.
_AXES = ("lane", "head", "tile")
_SWIZZLE = 128  # bytes
_OPTIONS = {"approx_math": True, "reduction_scratch_bytes": 0}
if _unknown := [name for name in _OPTIONS if not hasattr(CompilerParams, name)]:
    raise ImportError(f"CompilerParams has no {', '.join(_unknown)}")
_PARAMS = CompilerParams(  # Layouts are explicit here; jax 0.11 would infer them by default.
    **_OPTIONS, lowering_semantics=LoweringSemantics.Lane
)


def program_place() -> tuple[Array, Array, Array]:
    """Returns the lane, the head and the tile of the program."""
    lane, head, tile = (jax.lax.axis_index(name) for name in _AXES)
    return lane, head, tile


# Tiles in shared memory, in the layout in which products read them.


def _tiling(itemsize: int) -> tuple[Any, ...]:
    """Returns the transforms of a tile whose elements have this many bytes."""
    # mypy considers both classes abstract.
    made: tuple[Any, Any] = TilingTransform, SwizzleTransform
    return made[0]((8, _SWIZZLE // itemsize)), made[1](_SWIZZLE)


def vector_tiles(x: Array, slots: int) -> Any:
    """Returns shared memory for tiles of vectors [..., K], each vector split into parts."""
    parts = vector_parts(x)
    shape = (slots, parts, TILE, x.shape[-1] // parts)
    return SMEM(shape, x.dtype, transforms=_tiling(x.dtype.itemsize))


def square_tiles(slots: int) -> Any:
    """Returns shared memory for tiles with a number for each pair of rows of two tiles."""
    return SMEM((slots, TILE, TILE), jnp.float32, transforms=_tiling(4))


def row_numbers(slots: int) -> Any:
    """Returns shared memory for the two `sums` of every row of a tile."""
    return SMEM((slots, 2, TILE), jnp.float32)


def barrier(copies: int, slots: int = 1) -> Any:
    """Returns barriers for `slots` slots, each of which waits for `copies` copies."""
    return Barrier(num_arrivals=copies, num_barriers=slots)


def copy_vectors(array: Any, place: tuple[Array, ...], to: Any, arrived: Any) -> None:
    """Starts the copy of a tile of [B, T, H, K]; `place` is the lane, the tile and the head."""
    lane, tile, head = place
    parts, _, width = to.shape
    for part in range(parts):
        there = array.at[lane, pl.ds(tile * TILE, TILE), head, pl.ds(part * width, width)]
        copy_gmem_to_smem(there, to.at[part], arrived)


def copy_square(array: Any, head: Array, row: Any, column: Array, to: Any, arrived: Any) -> None:
    """Starts the copy of a tile of [H, R, C]."""
    there = array.at[head, pl.ds(row * TILE, TILE), pl.ds(column * TILE, TILE)]
    copy_gmem_to_smem(there, to, arrived)


def copy_factors(
    inputs: WindowMosaicInputs,
    head: Array,
    row: Array,
    column: Array,
    to: Any,
    slot: Any,
    arrived: Any,
) -> None:
    """Starts the copy of dropout's factors for a query tile and a key tile, if there is dropout."""
    if to is not None:
        row, column = (jax.lax.rem(tile, inputs.per_window) for tile in (row, column))
        copy_square(inputs.dropout, head, row, column, to.at[slot], arrived)


def copy_numbers(sums: Any, place: tuple[Array, ...], to: Any, arrived: Any) -> None:
    """Starts the copy of a tile of [B, H, 2, T]; `place` is the lane, the tile and the head."""
    lane, tile, head = place
    copy_gmem_to_smem(sums.at[lane, head, :, pl.ds(tile * TILE, TILE)], to, arrived)


def write_vectors(
    parts: list[Array], through: Any, to: Any, place: tuple[Array, ...], first: Any = 0
) -> None:
    """Writes the parts of a tile's vectors from part `first` on to an array [B, T, H, K]."""
    lane, tile, head = place
    width = through.shape[2]
    for n, part in enumerate(parts):
        through[n] = part.astype(through.dtype)
    commit_smem()
    for n in range(len(parts)):
        columns = pl.ds((first + n) * width, width)
        there = to.at[lane, pl.ds(tile * TILE, TILE), head, columns]
        copy_smem_to_gmem(through.at[n], there)
    wait_smem_to_gmem(0)


def write_square(square: Array, through: Any, to: Any, place: tuple[Array, ...]) -> None:
    """Writes a tile of [G, H, TILE, X]; `place` is the group, the head and the tile."""
    group, head, column = place
    through[...] = square
    commit_smem()
    copy_smem_to_gmem(through, to.at[group, head, :, pl.ds(column * TILE, TILE)])
    wait_smem_to_gmem(0)


class CopyRing(NamedTuple):
    """Slots in shared memory that are filled in turns: the n-th copies go to slot n modulo their
    count.

    Attributes:
      arrived: a barrier for each slot.
      copy: starts the n-th copies; its arguments are n, the slot and the slot's barrier.
    """

    arrived: Any
    copy: Callable[[Any, Any, Any], None]

    def walk(self, count: Any, step: Callable[[Array, Array, Any], Any], carry: Any) -> Any:
        """Runs `carry = step(n, slot, carry)` for all n below `count`, when the n-th copies have
        arrived.
        """
        slots = self.arrived.shape[0]

        def order(n: Any, slot: Any) -> None:
            pl.when(n < count)(lambda: self.copy(n, slot, self.arrived.at[slot]))

        def once(n: Array, carry: Any) -> Any:
            slot = jax.lax.rem(n, slots) if slots > 1 else opaque_zero(n)
            barrier_wait(self.arrived.at[slot])
            carry = step(n, slot, carry)
            wgmma_wait(0)  # The products that read the slot must be done before it is overwritten.
            order(n + slots, slot)
            return carry

        for n in range(slots):
            order(n, n)
        return jax.lax.fori_loop(0, count, once, carry)


# Values in registers, in the layout of a product's result.


def tile_product(a: Any, b: Any) -> Float[Array, "R C"]:
    """Returns the products of all vectors of two tiles."""

    def multiply(total: Any) -> Array:
        for part in range(a.shape[0]):
            wgmma(total, a.at[part], b.at[part].T)
        return total[...]

    return pl.run_scoped(multiply, ACC((TILE, TILE), jnp.float32))


def accumulate(
    count: int, width: int, walk: Callable[..., Any]
) -> tuple[list[Float[Array, "R P"]], Any]:
    """Allocates `count` accumulators and passes them to `walk`; returns their values and its
    result.
    """

    def gathered(*totals: Any) -> tuple[list[Array], Any]:
        arguments = walk(*totals)
        return [total[...] for total in totals], arguments

    return pl.run_scoped(gathered, *[ACC((TILE, width), jnp.float32)] * count)


def constant(value: float, *shape: int) -> Array:
    """Returns a constant array; with one axis, it has one number for each row."""
    layout = Layout.WGMMA if len(shape) == 2 else Layout.WGMMA.reduce(1)
    return layout_cast(jnp.full(shape, value, jnp.float32), layout)


def broadcast_rows(x: Array, columns: int = TILE) -> Float[Array, "R C"]:
    """Broadcasts one number per row along the row."""
    return jax.lax.broadcast_in_dim(x, (TILE, columns), [0])


def read_by_row(ref: Any) -> Float[Array, "R C"]:
    """Reads one number per row from shared memory and broadcasts it along the row."""
    return broadcast_rows(layout_cast(ref[...], Layout.WGMMA.reduce(1)))


def read_by_column(ref: Any) -> Float[Array, "R C"]:
    """Reads one number per column from shared memory and broadcasts it along the column."""
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
    """Runs a kernel on a grid of (lane or part of a lane, head, tile)."""
    arguments = [x for x in inputs if x is not None]

    def body(*refs: Any) -> None:
        remaining = iter(refs)
        places = WindowMosaicInputs(*(None if x is None else next(remaining) for x in inputs))
        results = [next(remaining) for _ in outputs]
        function(places, *results, **dict(zip(scratch, remaining, strict=True)), **options)

    return kernel(
        body, out_type=outputs, grid=grid, grid_names=_AXES,
        scratch_types=list(scratch.values()), kernel_name=function.__name__, interpret=interpret,
        compiler_params=_PARAMS,
    )(*arguments)  # fmt: skip
