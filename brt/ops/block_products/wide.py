"""Layouts of the operands of block products in the TPU kernels.

The two sides of a product have different sizes. The narrow side has one vector of C numbers for
each row. The wide side has several vectors for each row: A groups of H heads with K numbers. The
kernels read the wide side with heads first, as attention reads and writes it.
"""

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

# The kernels take at most this many rows, counted over all lanes. With more rows, the products that
# XLA compiles use both cores better.
_ROWS = 512


class Wide(NamedTuple):
    """The layout of the wide side: an array [A, B, H, R, K], divided into tiles of some heads or
    columns.

    B is the number of lanes (rows of the batch), and R the number of rows of a lane. One of these
    rows has A * H * K numbers.

    Attributes:
      groups: A, the product of all axes before the heads.
      heads: H, the number of heads of a group.
      width: K, the size of a head.
      tile: the number of heads of a tile, and the number of columns that the tile has of each of
        these heads.
    """

    groups: int
    heads: int
    width: int
    tile: tuple[int, int]

    @classmethod
    def from_kernel(cls, kernel: Array, *, narrow_first: bool) -> "Wide":
        """Returns the layout of the wide side of a product, undivided (as a single tile).

        Args:
          kernel: the weights of the product (an array, not a Pallas kernel), [C, *axes] or
            [*axes, C]. The last of `axes` is the width K of a head, the axis before it is the
            number of heads H (1 if there is none), and A is the product of all other axes.
          narrow_first: True if C is the first axis of `kernel`; False if it is the last.
        """
        *others, width = kernel.shape[1:] if narrow_first else kernel.shape[:-1]
        *first, heads = others or (1,)
        return cls(math.prod(first), heads, width, (heads, width))

    def cut(self, columns: int) -> "Wide":
        """Returns the same layout, divided into tiles of at most `columns` columns.

        The columns of all heads of a tile are counted together.
        """
        if self.width > columns:
            return self._replace(tile=(1, math.gcd(self.width, columns)))
        return self._replace(tile=(math.gcd(self.heads, columns // self.width), self.width))

    @property
    def axes(self) -> tuple[int, int, int]:
        """The sizes of the axes A, H and K, which together are the numbers of one row."""
        return self.groups, self.heads, self.width

    @property
    def size(self) -> int:
        """The number of numbers of one row, A * H * K."""
        return math.prod(self.axes)

    @property
    def padded_size(self) -> int:
        """The number of columns of one row in VMEM, where a head fills complete registers."""
        return self.groups * self.heads * max(self.width, LANES)

    @property
    def tiles(self) -> int:
        """The number of tiles."""
        return self.size // math.prod(self.tile)

    def place(self, i: Any) -> tuple[Any, Any, Any]:
        """Returns the position of the i-th tile along A, H and K, in tiles."""
        there, column = _divided(i, self.width // self.tile[1])
        return *_divided(there, self.heads // self.tile[0]), column

    def by_head(self, x: Shaped[Array, "B R ..."]) -> Shaped[Array, "A B H R K"]:
        """Reshapes x from [B, R, *axes] to [A, B, H, R, K]."""
        x = x.reshape(*x.shape[:2], *self.axes)
        return x[:, :, 0].swapaxes(1, 2)[None] if self.groups == 1 else x.transpose(2, 0, 3, 1, 4)

    def by_row(self, x: Shaped[Array, "A B H R K"], axes: Sequence[int]) -> Array:
        """Reshapes x from [A, B, H, R, K] to [B, R, *axes], where the product of `axes` is A * H *
        K.
        """
        y = x[0].swapaxes(1, 2) if self.groups == 1 else x.transpose(1, 3, 0, 2, 4)
        return y.reshape(*y.shape[:2], *axes)


class Weights(NamedTuple):
    """Kernels with heads first: an array [1, A, H, *tile] for each kernel, or one array [P, A, H,
    *tile] for all P kernels.

    Attributes:
      arrays: the array of each kernel; the same array P times if all kernels are in one.
      narrow_first: True if the axis of the narrow side is the first of the last two axes.
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
        """Returns kernels in the layout of this class, converted to `dtype`.

        Args:
          kernels: a sequence of kernels, each [C, *axes] if `narrow_first` and otherwise [*axes,
            C]; or one array with all kernels stacked on axis 0.
          wides: the layout of the wide side of each kernel. If `kernels` is one array, only the
            first layout is used.
          dtype: the dtype of the result.
          narrow_first: True if the axis C of the narrow side is the first axis of a kernel.
        """

        def by_head(kernel: Array, wide: Wide) -> Array:
            """Returns P stacked kernels with the axes of groups and heads directly after the axis
            P.

            `wide` is the layout of the wide side of the kernels.

            A kernel [C, *axes] becomes [A, H, C, K] if `narrow_first`; a kernel [*axes, C] becomes
            [A, H, K, C].
            """
            kernel = kernel.astype(dtype)
            if narrow_first:
                return kernel.reshape(len(kernel), -1, *wide.axes).transpose(0, 2, 3, 1, 4)
            return kernel.reshape(len(kernel), *wide.axes, -1)

        if isinstance(kernels, jax.Array):
            return cls([by_head(kernels, wides[0])] * len(kernels), narrow_first)
        pairs = zip(kernels, wides, strict=True)
        return cls([by_head(kernel[None], wide) for kernel, wide in pairs], narrow_first)

    def wide_tile_specs(self, wide: Wide, narrow: int) -> list[pl.BlockSpec]:
        """Returns the block spec of each kernel for `shared_input_matmul`.

        A step reads a tile of the wide side and the `narrow` numbers of the complete narrow side.
        """
        heads, columns = wide.tile

        def kernel_spec(p: int) -> pl.BlockSpec:
            """Returns the Pallas block spec of a weight array.

            Args:
              p: the index of the weight array on axis 0 of the array that stacks it with others.
            """

            def kernel_index(i: Any, _: Any) -> tuple:
                """Returns the block of the weight array that the grid step with tile i of the
                wide side reads, as a position along each axis of the stacked array.
                """
                a, h, k = wide.place(i)
                return (p, a, h, 0, k) if self.narrow_first else (p, a, h, k, 0)

            tile = (narrow, columns) if self.narrow_first else (columns, narrow)
            return pl.BlockSpec((None, None, heads, *tile), kernel_index)

        return [kernel_spec(p) for p in self._indices()]

    def narrow_tile_specs(self, wides: Sequence[Wide], columns: int) -> list[pl.BlockSpec]:
        """Returns the block spec of each kernel for `summed_matmul`.

        A step reads a tile of `columns` numbers of the narrow side and the complete wide side,
        whose layout for each kernel is in `wides`.
        """

        def kernel_spec(p: int, wide: Wide) -> pl.BlockSpec:
            """Returns the Pallas block spec of a weight array.

            Args:
              p: the index of the weight array on axis 0 of the array that stacks it with others.
              wide: the layout of the wide side of the weight array.
            """

            def kernel_index(i: Any, _: Any) -> tuple:
                """Returns the block of the weight array that the grid step with tile i of the
                narrow side reads, as a position along each axis of the stacked array.
                """
                return (p, 0, 0, i, 0) if self.narrow_first else (p, 0, 0, 0, i)

            tile = (columns, wide.width) if self.narrow_first else (wide.width, columns)
            return pl.BlockSpec((None, wide.groups, wide.heads, *tile), kernel_index)

        return [kernel_spec(*pair) for pair in zip(self._indices(), wides, strict=True)]

    def _indices(self) -> list[int]:
        """Returns the index of each kernel in its array."""
        return [p if len(array) > 1 else 0 for p, array in enumerate(self.arrays)]


def _divided(i: Any, count: int) -> tuple[Any, Any]:
    return jax.lax.div(i, jnp.int32(count)), jax.lax.rem(i, jnp.int32(count))


def refusal(
    rows: tuple[int, ...], dtype: jnp.dtype, narrow: int, wides: Sequence[Wide]
) -> str | None:
    """Returns the reason why no kernel supports these sizes, or None if one does.

    Args:
      rows: the number of lanes and the number of rows of a lane.
      dtype: the dtype of the operands.
      narrow: C, the numbers of a row on the narrow side.
      wides: the layouts of the wide side, one for each kernel.
    """
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


def compiler_options(multiplications: int, *read: Array) -> dict[str, Any]:
    """Returns the arguments of `pl.pallas_call` for the compiler and for the cost estimate.

    Args:
      multiplications: the number of multiplications.
      *read: the bfloat16 arrays that the kernel reads.
    """
    return {
        "compiler_params": pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        "cost_estimate": pl.CostEstimate(
            flops=2 * multiplications, transcendentals=0,
            bytes_accessed=sum(2 * x.size for x in read),
        ),
    }  # fmt: skip
