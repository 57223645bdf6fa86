"""Layouts of block products in kernels: the side with several vectors per row, with heads first."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Shaped

from brt.distributed import rules
from brt.ops.tpu import LANES, VMEM_BYTES, cores_per_chip

_ROWS = 512  # at most, of all lanes: of more, compilers fill both cores better


class Wide(NamedTuple):
    """An array [A, B, H, R, K] with groups and heads around lanes, divided into tiles of some heads
    or columns.

    Attributes:
      groups, heads, width: A, H, K.
      tile: heads and columns of a tile.
    """

    groups: int
    heads: int
    width: int
    tile: tuple[int, int]

    @classmethod
    def of(cls, kernel: Array, *, narrow_first: bool) -> "Wide":
        """Returns the layout for a kernel [C, *axes] (`narrow_first`) or [*axes, C] as a single
        tile.
        """
        *others, width = kernel.shape[1:] if narrow_first else kernel.shape[:-1]
        *first, heads = others or (1,)
        return cls(math.prod(first), heads, width, (heads, width))

    def cut(self, columns: int) -> "Wide":
        """Returns the layout with tiles of at most the given number of columns."""
        if self.width > columns:
            return self._replace(tile=(1, math.gcd(self.width, columns)))
        return self._replace(tile=(math.gcd(self.heads, columns // self.width), self.width))

    @property
    def axes(self) -> tuple[int, int, int]:
        return self.groups, self.heads, self.width

    @property
    def size(self) -> int:
        return math.prod(self.axes)

    @property
    def held(self) -> int:
        """Returns the number of values of the wide side in registers, padded to whole lanes."""
        return self.groups * self.heads * max(self.width, LANES)

    @property
    def tiles(self) -> int:
        return self.size // math.prod(self.tile)

    def place(self, i: Any) -> tuple[Any, Any, Any]:
        """Returns the position of the i-th tile along A, H and K."""
        there, column = _divided(i, self.width // self.tile[1])
        return *_divided(there, self.heads // self.tile[0]), column

    def by_head(self, x: Shaped[Array, "B R ..."]) -> Shaped[Array, "A B H R K"]:
        """Reshapes [B, R, *axes] to [A, B, H, R, K]; a single group needs no transpose."""
        x = x.reshape(*x.shape[:2], *self.axes)
        return x[:, :, 0].swapaxes(1, 2)[None] if self.groups == 1 else x.transpose(2, 0, 3, 1, 4)

    def by_row(self, x: Shaped[Array, "A B H R K"], axes: Sequence[int]) -> Array:
        """Reshapes [A, B, H, R, K] to [B, R, *axes]."""
        y = x[0].swapaxes(1, 2) if self.groups == 1 else x.transpose(1, 3, 0, 2, 4)
        return y.reshape(*y.shape[:2], *axes)


class Weights(NamedTuple):
    """Kernels with heads first: an array [1, A, H, *tile] for each kernel, or one array [P, A, H,
    *tile] for all.

    Attributes:
      narrow_first: True if the axis with one vector is the first of a tile's two axes.
    """

    arrays: list[Shaped[Array, "P A H ..."]]
    narrow_first: bool

    @classmethod
    def of(
        cls,
        kernels: Sequence[Array] | Array,
        wides: Sequence[Wide],
        dtype: jnp.dtype,
        *,
        narrow_first: bool,
    ) -> "Weights":
        """Rearranges kernels [C, *axes] (`narrow_first`) or [*axes, C], or one array of them."""

        def by_head(kernel: Array, wide: Wide) -> Array:
            kernel = kernel.astype(dtype)
            if narrow_first:
                return kernel.reshape(len(kernel), -1, *wide.axes).transpose(0, 2, 3, 1, 4)
            return kernel.reshape(len(kernel), *wide.axes, -1)

        if isinstance(kernels, jax.Array):
            return cls([by_head(kernels, wides[0])] * len(kernels), narrow_first)
        pairs = zip(kernels, wides, strict=True)
        return cls([by_head(kernel[None], wide) for kernel, wide in pairs], narrow_first)

    def spread(self, wide: Wide, narrow: int) -> list[pl.BlockSpec]:
        """Returns the block specs for `spread`: a step reads a tile of the wide side and the whole
        narrow side.
        """
        heads, columns = wide.tile

        def place(p: int) -> pl.BlockSpec:
            def there(i: Any, _: Any) -> tuple:
                a, h, k = wide.place(i)
                return (p, a, h, 0, k) if self.narrow_first else (p, a, h, k, 0)

            tile = (narrow, columns) if self.narrow_first else (columns, narrow)
            return pl.BlockSpec((None, None, heads, *tile), there)

        return [place(p) for p in self._parts()]

    def gathered(self, wides: Sequence[Wide], columns: int) -> list[pl.BlockSpec]:
        """Returns the block specs of the array that a kernel gathers: each step of the grid reads
        a tile of `columns` of the narrow side, and all of the wide side.
        """

        def place(p: int, wide: Wide) -> pl.BlockSpec:
            def there(i: Any, _: Any) -> tuple:
                return (p, 0, 0, i, 0) if self.narrow_first else (p, 0, 0, 0, i)

            tile = (columns, wide.width) if self.narrow_first else (wide.width, columns)
            return pl.BlockSpec((None, wide.groups, wide.heads, *tile), there)

        return [place(*pair) for pair in zip(self._parts(), wides, strict=True)]

    def _parts(self) -> list[int]:
        """Returns the index of each kernel in its array."""
        return [p if len(array) > 1 else 0 for p, array in enumerate(self.arrays)]


def _divided(i: Any, count: int) -> tuple[Any, Any]:
    return jax.lax.div(i, jnp.int32(count)), jax.lax.rem(i, jnp.int32(count))


def refuses(
    rows: tuple[int, ...], dtype: jnp.dtype, narrow: int, wides: Sequence[Wide]
) -> str | None:
    """Returns why no kernel supports these rows of lanes, or None."""
    if rules.partitioned():
        return "multiplies what one device has"
    if cores_per_chip() == 1:
        return "is for chips whose two cores share a product: others' compilers multiply as well"
    if dtype != jnp.bfloat16:
        return f"computes in bfloat16, not in {dtype}"
    if len(rows) != 2 or rows[1] % LANES or math.prod(rows) > _ROWS:
        return f"takes rows of lanes, a multiple of {LANES} and {_ROWS} at most, not {rows}"
    if narrow % LANES or any(wide.width % LANES and wide.width != 64 for wide in wides):
        widths = sorted({narrow, *(wide.width for wide in wides)})
        return f"takes multiples of {LANES} columns, or heads of 64, not {widths}"
    return None


def options(multiplications: int, *read: Array) -> dict[str, Any]:
    """Returns the compiler options and the cost estimate of both kernels."""
    return {
        "compiler_params": pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        "cost_estimate": pl.CostEstimate(
            flops=2 * multiplications, transcendentals=0,
            bytes_accessed=sum(2 * x.size for x in read),
        ),
    }  # fmt: skip
