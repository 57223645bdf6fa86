"""Memory layouts of inputs, outputs and weight arrays in the TPU kernels of block products.

Block products are the matrix products in `pallas_tpu`: one input is multiplied with several weight
arrays, or the products of several inputs with their weight arrays are added up. The input and the
output of a product are called its two sides. One of them, the narrow side, has a vector of C
numbers for each row. The other one, the wide side, has A groups of H heads with K numbers for each
row. In arrays of the wide side, the kernels have the axis of heads before the axis of rows, as in
the kernels of attention. A weight array connects the C numbers with the A * H * K numbers.

Arguments named `kernel` or `kernels` are weight arrays, not Pallas kernels.
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

# The TPU kernels accept at most this many rows, added up over all lanes. With more rows, the
# products that XLA compiles make better use of the two cores of a chip.
_ROWS = 512


class HeadLayout(NamedTuple):
    """Layout of the input or output of a product that has A groups of H heads with K numbers for
    each row.

    The kernels read or write such an array as [A, B, H, R, K], where B is the number of lanes (rows
    of the batch) and R the number of rows (tokens) of a lane. The A * H * K columns are divided
    into tiles. A step of the grid of `shared_input_matmul` writes one tile of its output; a step of
    `summed_matmul` reads all columns of its inputs.

    Attributes:
      groups: A, the product of all axes before the heads.
      heads: H, the number of heads of a group.
      width: K, the size of a head.
      tile: the number of heads of a tile, and the number of columns that a tile has of each of its
        heads.
    """

    groups: int
    heads: int
    width: int
    tile: tuple[int, int]

    @classmethod
    def from_kernel(cls, kernel: Array, *, narrow_first: bool) -> "HeadLayout":
        """Returns the layout that belongs to the axes of a weight array, with one tile for each
        group of heads.

        Args:
          kernel: the weight array, [C, *axes] or [*axes, C]. The last of `axes` is the width K of a
            head, the axis before it is the number of heads H (1 if there is none), and A is the
            product of all other axes.
          narrow_first: True if C is the first axis of `kernel`; False if C is the last axis.
        """
        *others, width = kernel.shape[1:] if narrow_first else kernel.shape[:-1]
        *first, heads = others or (1,)
        return cls(math.prod(first), heads, width, (heads, width))

    def with_tiles(self, columns: int) -> "HeadLayout":
        """Returns the same layout with tiles of at most `columns` columns.

        A tile has all columns of one or several heads. Only if a head has more than `columns`
        columns, a tile has a part of the columns of one head.
        """
        if self.width > columns:
            return self._replace(tile=(1, math.gcd(self.width, columns)))
        return self._replace(tile=(math.gcd(self.heads, columns // self.width), self.width))

    @property
    def axes(self) -> tuple[int, int, int]:
        """The sizes (A, H, K) of the axes that hold the numbers of one row."""
        return self.groups, self.heads, self.width

    @property
    def size(self) -> int:
        """The number of numbers of one row, A * H * K."""
        return math.prod(self.axes)

    @property
    def padded_size(self) -> int:
        """The number of columns of one row in VMEM, where a narrower head is padded to 128 columns,
        the number of lanes of a vector register.
        """
        return self.groups * self.heads * max(self.width, LANES)

    @property
    def tiles(self) -> int:
        """The number of tiles into which the A * H * K columns are divided."""
        return self.size // math.prod(self.tile)

    def tile_index(self, i: Any) -> tuple[Any, Any, Any]:
        """Returns the index of tile i along each of the axes A, H and K.

        The indices count tiles, as the block indices of a Pallas `BlockSpec` do.
        """
        there, column = _divided(i, self.width // self.tile[1])
        return *_divided(there, self.heads // self.tile[0]), column

    def by_head(self, x: Shaped[Array, "B R ..."]) -> Shaped[Array, "A B H R K"]:
        """Returns an array x [B, R, *axes] as an array [A, B, H, R, K], with heads before rows.

        The product of `axes` is A * H * K.
        """
        x = x.reshape(*x.shape[:2], *self.axes)
        return x[:, :, 0].swapaxes(1, 2)[None] if self.groups == 1 else x.transpose(2, 0, 3, 1, 4)

    def by_row(self, x: Shaped[Array, "A B H R K"], axes: Sequence[int]) -> Array:
        """Returns an array x [A, B, H, R, K] as an array [B, R, *axes]; the inverse of `by_head`.

        The product of `axes` is A * H * K.
        """
        y = x[0].swapaxes(1, 2) if self.groups == 1 else x.transpose(1, 3, 0, 2, 4)
        return y.reshape(*y.shape[:2], *axes)


class Weights(NamedTuple):
    """The weight arrays of P products, in the form in which the TPU kernels read them.

    Attributes:
      arrays: P entries, one for each product. An entry is an array [1, A, H, C, K] if
        `narrow_first`, and otherwise [1, A, H, K, C]. If the weights of all products are stacked in
        one array, all P entries are this array, and its first axis has size P instead of 1.
      narrow_first: True if the axis C is before the axis K.
    """

    arrays: list[Shaped[Array, "P A H ..."]]
    narrow_first: bool

    @classmethod
    def of(
        cls,
        kernels: Sequence[Array] | Array,
        wides: Sequence[HeadLayout],
        dtype: jnp.dtype,
        *,
        narrow_first: bool,
    ) -> "Weights":
        """Returns a `Weights` that contains the given weight arrays, converted to `dtype`.

        Args:
          kernels: a sequence of weight arrays, each [C, *axes] if `narrow_first` and otherwise
            [*axes, C]; or one array in which all of them are stacked on axis 0.
          wides: the sizes A, H and K of each weight array. If `kernels` is one array, only the
            first entry is used.
          dtype: the dtype of the result.
          narrow_first: True if C is the first axis of a weight array; False if C is the last axis.
        """

        def by_head(kernel: Array, wide: HeadLayout) -> Array:
            """Returns P stacked weight arrays as [P, A, H, C, K] or [P, A, H, K, C], in `dtype`.

            Args:
              kernel: [P, C, *axes] if `narrow_first`, and otherwise [P, *axes, C].
              wide: the sizes A, H and K.
            """
            kernel = kernel.astype(dtype)
            if narrow_first:
                return kernel.reshape(len(kernel), -1, *wide.axes).transpose(0, 2, 3, 1, 4)
            return kernel.reshape(len(kernel), *wide.axes, -1)

        if isinstance(kernels, jax.Array):
            return cls([by_head(kernels, wides[0])] * len(kernels), narrow_first)
        pairs = zip(kernels, wides, strict=True)
        return cls([by_head(kernel[None], wide) for kernel, wide in pairs], narrow_first)

    def wide_tile_specs(self, wide: HeadLayout, narrow: int) -> list[pl.BlockSpec]:
        """Returns the block spec of each weight array for `shared_input_matmul`.

        A step of the grid computes one tile of the output's A * H * K columns, and therefore reads
        the weights of this tile for all C numbers of the input.

        Args:
          wide: the layout of the output.
          narrow: C, the size of a row of the input.
        """
        heads, columns = wide.tile

        def kernel_spec(p: int) -> pl.BlockSpec:
            """Returns the Pallas block spec of a weight array.

            Args:
              p: the index of the weight array along axis 0 of the stacked array; 0 if it is not
                stacked with others.
            """

            def kernel_index(i: Any, _: Any) -> tuple:
                """Returns the index of the block that a step reads, with an entry for each axis of
                the stacked array, where i is the index of the step's tile of output columns.
                """
                a, h, k = wide.tile_index(i)
                return (p, a, h, 0, k) if self.narrow_first else (p, a, h, k, 0)

            tile = (narrow, columns) if self.narrow_first else (columns, narrow)
            return pl.BlockSpec((None, None, heads, *tile), kernel_index)

        return [kernel_spec(p) for p in self._indices()]

    def narrow_tile_specs(self, wides: Sequence[HeadLayout], columns: int) -> list[pl.BlockSpec]:
        """Returns the block spec of each weight array for `summed_matmul`.

        A step of the grid computes `columns` of the output's C columns, and therefore reads the
        weights of these columns for all numbers of the inputs.

        Args:
          wides: the layout of each input.
          columns: the number of output columns of a step.
        """

        def kernel_spec(p: int, wide: HeadLayout) -> pl.BlockSpec:
            """Returns the Pallas block spec of a weight array.

            Args:
              p: the index of the weight array along axis 0 of the stacked array; 0 if it is not
                stacked with others.
              wide: the layout of the input that is multiplied with the weight array.
            """

            def kernel_index(i: Any, _: Any) -> tuple:
                """Returns the index of the block that a step reads, with an entry for each axis of
                the stacked array, where i is the index of the step's tile of output columns.
                """
                return (p, 0, 0, i, 0) if self.narrow_first else (p, 0, 0, 0, i)

            tile = (columns, wide.width) if self.narrow_first else (wide.width, columns)
            return pl.BlockSpec((None, wide.groups, wide.heads, *tile), kernel_index)

        return [kernel_spec(*pair) for pair in zip(self._indices(), wides, strict=True)]

    def _indices(self) -> list[int]:
        """Returns the index of each weight array along axis 0 of its entry in `arrays`."""
        return [p if len(array) > 1 else 0 for p, array in enumerate(self.arrays)]


def _divided(i: Any, count: int) -> tuple[Any, Any]:
    return jax.lax.div(i, jnp.int32(count)), jax.lax.rem(i, jnp.int32(count))


def refusal(
    rows: tuple[int, ...], dtype: jnp.dtype, narrow: int, wides: Sequence[HeadLayout]
) -> str | None:
    """Returns the reason why the TPU kernels do not support products of these sizes, or None if
    they do.

    Args:
      rows: the number of lanes and the number of rows of a lane.
      dtype: the dtype of the input.
      narrow: C, the size of a row on the narrow side of the product.
      wides: the layouts of the wide side, one for each weight array.
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
    """Returns the keyword arguments `compiler_params` and `cost_estimate` of `pl.pallas_call`.

    Args:
      multiplications: the number of multiplications of the kernel.
      *read: the arrays that the kernel reads. The cost estimate counts two bytes, the size of a
        bfloat16 number, for each of their numbers.
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
