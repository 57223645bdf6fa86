"""What `mosaic_kernels` are made of: tiles in a Hopper GPU's memories, copies, products.

Tiles arrive in shared memory by TMA while others are computed with. Nobody but these copies arrives
at a barrier, and every copy is awaited by the warpgroup that ordered it: none can wait for another.

All that Mosaic GPU is asked for is imported here: a jax whose names differ has no such kernels, and
no error but an ImportError says so.
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

from brt.ops.window_attention.mosaic_inputs import TILE, Inputs, parts_of, zero

_AXES = ("lane", "head", "tile")  # the last one runs first: neighbours share what they read
_SWIZZLE = 128  # bytes
_OPTIONS = {"approx_math": True, "reduction_scratch_bytes": 0}
if _unknown := [name for name in _OPTIONS if not hasattr(CompilerParams, name)]:
    raise ImportError(f"CompilerParams has no {', '.join(_unknown)}")
_PARAMS = CompilerParams(  # layouts are said here, not found by the compiler: jax 0.11's default
    **_OPTIONS, lowering_semantics=LoweringSemantics.Lane
)


def place() -> tuple[Array, Array, Array]:
    """Lane, head and tile of the program."""
    lane, head, tile = (jax.lax.axis_index(name) for name in _AXES)
    return lane, head, tile


# In shared memory, tiles laid out as products read them.


def _tiling(itemsize: int) -> tuple[Any, ...]:
    """Of elements of so many bytes."""
    made: tuple[Any, Any] = TilingTransform, SwizzleTransform  # mypy takes both for abstract
    return made[0]((8, _SWIZZLE // itemsize)), made[1](_SWIZZLE)


def vectors(x: Array, slots: int) -> Any:
    """Tiles of [..., K], of each vector one part after the other."""
    parts = parts_of(x)
    shape = (slots, parts, TILE, x.shape[-1] // parts)
    return SMEM(shape, x.dtype, transforms=_tiling(x.dtype.itemsize))


def square(slots: int) -> Any:
    """What there is of every pair of rows of two tiles."""
    return SMEM((slots, TILE, TILE), jnp.float32, transforms=_tiling(4))


def numbers(slots: int) -> Any:
    """Both `sums` of every row."""
    return SMEM((slots, 2, TILE), jnp.float32)


def barrier(copies: int, slots: int = 1) -> Any:
    return Barrier(num_arrivals=copies, num_barriers=slots)


def copy_vectors(array: Any, place: tuple[Array, ...], to: Any, arrived: Any) -> None:
    """A tile of [B, T, H, K]: of a lane, the tile's number, and head."""
    lane, tile, head = place
    parts, _, width = to.shape
    for part in range(parts):
        there = array.at[lane, pl.ds(tile * TILE, TILE), head, pl.ds(part * width, width)]
        copy_gmem_to_smem(there, to.at[part], arrived)


def copy_square(array: Any, head: Array, row: Any, column: Array, to: Any, arrived: Any) -> None:
    """A tile of [H, R, C]."""
    there = array.at[head, pl.ds(row * TILE, TILE), pl.ds(column * TILE, TILE)]
    copy_gmem_to_smem(there, to, arrived)


def copy_factors(
    inputs: Inputs, head: Array, row: Array, column: Array, to: Any, slot: Any, arrived: Any
) -> None:
    """Dropout's, of the pairs of two tiles: of a block's rows and slots."""
    if to is not None:
        row, column = (jax.lax.rem(tile, inputs.per_window) for tile in (row, column))
        copy_square(inputs.dropout, head, row, column, to.at[slot], arrived)


def copy_numbers(sums: Any, place: tuple[Array, ...], to: Any, arrived: Any) -> None:
    """A tile of [B, H, 2, T]."""
    lane, tile, head = place
    copy_gmem_to_smem(sums.at[lane, head, :, pl.ds(tile * TILE, TILE)], to, arrived)


def write_vectors(
    parts: list[Array], through: Any, to: Any, place: tuple[Array, ...], first: Any = 0
) -> None:
    """The reverse of `copy_vectors`, of the parts from `first` on."""
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
    """A tile of [G, H, TILE, X]: of a group, head, and the tile's number."""
    group, head, column = place
    through[...] = square
    commit_smem()
    copy_smem_to_gmem(through, to.at[group, head, :, pl.ds(column * TILE, TILE)])
    wait_smem_to_gmem(0)


class Ring(NamedTuple):
    """What arrives in turns: the n-th copies go into slot n, modulo how many slots there are."""

    arrived: Any  # a barrier a slot
    copy: Callable[[Any, Any, Any], None]  # given n, its slot and the slot's barrier

    def walk(self, count: Any, step: Callable[[Array, Array, Any], Any], carry: Any) -> Any:
        """`step` of n, its slot and what the one before gave, for all n below `count`."""
        slots = self.arrived.shape[0]

        def order(n: Any, slot: Any) -> None:
            pl.when(n < count)(lambda: self.copy(n, slot, self.arrived.at[slot]))

        def once(n: Array, carry: Any) -> Any:
            slot = jax.lax.rem(n, slots) if slots > 1 else zero(n)
            barrier_wait(self.arrived.at[slot])
            carry = step(n, slot, carry)
            wgmma_wait(0)  # products have read the slot
            order(n + slots, slot)
            return carry

        for n in range(slots):
            order(n, n)
        return jax.lax.fori_loop(0, count, once, carry)


# In registers, laid out as products leave them.


def products(a: Any, b: Any) -> Float[Array, "R C"]:
    """Of all vectors of two tiles."""

    def multiply(total: Any) -> Array:
        for part in range(a.shape[0]):
            wgmma(total, a.at[part], b.at[part].T)
        return total[...]

    return pl.run_scoped(multiply, ACC((TILE, TILE), jnp.float32))


def added_up(
    count: int, width: int, walk: Callable[..., Any]
) -> tuple[list[Float[Array, "R P"]], Any]:
    """What `walk` makes of that many totals, and what it gives itself."""

    def gathered(*totals: Any) -> tuple[list[Array], Any]:
        given = walk(*totals)
        return [total[...] for total in totals], given

    return pl.run_scoped(gathered, *[ACC((TILE, width), jnp.float32)] * count)


def constant(value: float, *shape: int) -> Array:
    """Of one axis: a number a row."""
    layout = Layout.WGMMA if len(shape) == 2 else Layout.WGMMA.reduce(1)
    return layout_cast(jnp.full(shape, value, jnp.float32), layout)


def by_row(x: Array, columns: int = TILE) -> Float[Array, "R C"]:
    return jax.lax.broadcast_in_dim(x, (TILE, columns), [0])


def read_by_row(ref: Any) -> Float[Array, "R C"]:
    """A number a row, from shared memory."""
    return by_row(layout_cast(ref[...], Layout.WGMMA.reduce(1)))


def read_by_column(ref: Any) -> Float[Array, "R C"]:
    numbers = layout_cast(ref[...], Layout.WGMMA.reduce(0))
    return jax.lax.broadcast_in_dim(numbers, (TILE, TILE), [1])


def call(
    function: Callable[..., None],
    inputs: Inputs,
    outputs: list[jax.ShapeDtypeStruct],
    grid: tuple[int, int, int],
    interpret: Any,
    scratch: dict[str, Any],
    **options: Any,
) -> list[Array]:
    """A program is a lane or a part of one, a head, and a tile or the like."""
    given = [x for x in inputs if x is not None]

    def body(*refs: Any) -> None:
        found = iter(refs)
        places = Inputs(*(None if x is None else next(found) for x in inputs))
        results = [next(found) for _ in outputs]
        function(places, *results, **dict(zip(scratch, found, strict=True)), **options)

    return kernel(
        body, out_type=outputs, grid=grid, grid_names=_AXES,
        scratch_types=list(scratch.values()), kernel_name=function.__name__, interpret=interpret,
        compiler_params=_PARAMS,
    )(*given)  # fmt: skip
