"""Weight gradients on TPUs, without a copy of the arrays that the steps of a loop produce.

Each step of an unrolled loop writes its inputs x and its output gradients dy to arrays of their
own. A single product over all steps would begin by copying these arrays into one. This kernel
instead takes the arrays of each step as separate operands. A step of the kernel's grid computes one
tile of the weight gradient, the sum of x^T dy over all steps of the loop.

A product has two sides: the left side is the inputs of a step, and the right side is the output
gradients. Each side is read as an array [A, B, H, R, K], with B lanes (rows of the batch) of R
rows. The numbers of a row are the axes of the weight on this side: A groups of H heads with K
numbers each. The weight gradient has the axes A, H and K of both sides.
"""

import functools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Shaped

from brt.distributed import rules
from brt.ops import dispatch
from brt.ops.tpu import LANES, TN, VMEM_BYTES, dot_float32, vmem_refusal

# Limits of the columns of a tile on the left and on the right side of the product. For the left
# side, there are three limits; the kernel takes the first one with which the tiles fit into VMEM.
_LEFT, _RIGHT = (512, 256, 128), 256
# XLA fuses this kernel with an in-place update of the gradient, and then gives the kernel only this
# many bytes of VMEM, regardless of the limit that the kernel asks for.
_ROOM = 14 * 2**20
# The kernel accepts loops of at most this many steps, because every step adds to the
# code of the kernel.
_STEPS = 8


class _Side(NamedTuple):
    """The layout [A, B, H, R, K] of one side of the products in a step, and its division into
    tiles.

    The module docstring explains the axes. The R rows of a head lie together in memory.

    Attributes:
      groups: A and H.
      lanes, rows, width: B, R and K.
      heads: the number of heads of a tile.
      columns: the number of columns that a tile has of each of its heads.
    """

    groups: tuple[int, int]
    lanes: int
    rows: int
    width: int
    heads: int
    columns: int

    @classmethod
    def of(cls, x: Array, axes: int, most: int) -> "_Side":
        """Returns the layout of an array, divided into tiles.

        Args:
          x: [N, *rows, *features], the inputs or the output gradients of N steps.
          axes: the number of axes of `features`, which are also axes of the weight.
          most: the largest number of columns of a tile.
        """
        *others, width = x.shape[x.ndim - axes :]
        first, heads = (1,) * (2 - len(others)) + tuple(others)
        *lanes, rows = x.shape[1 : x.ndim - axes]
        columns = width if width <= most else math.gcd(width, most)
        at_once = math.gcd(heads, max(1, most // columns)) if columns == width else 1
        return cls((first, heads), math.prod(lanes), rows, width, at_once, columns)

    @property
    def tiles(self) -> int:
        """The number of tiles into which the columns of this side are divided."""
        return math.prod(self.groups) // self.heads * (self.width // self.columns)

    @property
    def tile(self) -> int:
        """The number of columns of a tile, over all of its heads."""
        return self.heads * self.columns

    @property
    def fills_registers(self) -> bool:
        """True if the kernel supports the tiles of this side: a head has a multiple of 64 columns,
        and a tile has all columns of a head or as many as fill complete vector registers.
        """
        return self.width % 64 == 0 and (self.columns == self.width or self.columns % LANES == 0)

    def place(self, i: Int[Array, ""]) -> tuple[Any, Any, Any]:
        """Returns the indices, counted in tiles, of the i-th tile along the axes A, H and K."""
        there, column = _divided(i, self.width // self.columns)
        return *_divided(there, self.groups[1] // self.heads), column

    def arrays_of_steps(self, parts: Iterable[Array]) -> list[Shaped[Array, "A B H R K"]]:
        """Returns the arrays `parts`, one for each step of the loop, in the layout of this class.

        Most of these arrays come from kernels that already write them in this layout, so that they
        need not be copied.
        """
        shape = self.lanes, self.rows, *self.groups, self.width
        return [part.reshape(shape).transpose(2, 0, 3, 1, 4) for part in parts]


def _divided(i: Any, count: int) -> tuple[Any, Any]:
    return jax.lax.div(i, jnp.int32(count)), jax.lax.rem(i, jnp.int32(count))


def refusal(
    x: Array, dy: Array, inputs: int = 1, outputs: int = 1, *, as_bits: bool = False
) -> str | None:
    """Returns the reason why the kernel does not support these inputs, or None if it does.

    The arguments are described in `weight_gradient`.
    """
    if rules.partitioned():
        return "adds up what one device has"
    if x.dtype != jnp.bfloat16 or dy.dtype != jnp.bfloat16:
        return f"computes in bfloat16, not in {x.dtype} and {dy.dtype}"
    if not 1 < len(x) <= _STEPS:
        return f"takes 2 to {_STEPS} steps, not {len(x)}"
    if max(inputs, outputs) > 3 or x.ndim - inputs != 3:
        return "takes rows of lanes, and at most 3 axes of inputs and of outputs"
    left, right = _sides(x, dy, inputs, outputs)
    if left.rows % 128 or not (left.fills_registers and right.fills_registers):
        return (
            f"takes a multiple of 128 rows, and of 128 columns or 64, 128, 192 or 256 of them, not "
            f"{left.rows} and {left.width} by {right.width}"
        )
    return vmem_refusal(_bytes(len(x), left, right), "tiles of all steps", _ROOM)


def _sides(x: Array, dy: Array, inputs: int, outputs: int) -> tuple[_Side, _Side]:
    """Returns the layouts of both sides with the largest tiles that fit into VMEM, or
    the smallest.
    """
    right = _Side.of(dy, outputs, _RIGHT)
    lefts = [_Side.of(x, inputs, most) for most in _LEFT]
    fit = (left for left in lefts if _bytes(len(x), left, right) <= _ROOM)
    return next(fit, lefts[-1]), right


def _bytes(steps: int, left: _Side, right: _Side) -> int:
    """Returns the bytes of VMEM for the left block, two right blocks, and the sums."""
    rows = steps * left.lanes * left.rows
    return rows * 2 * (left.tile + 2 * right.tile) + 4 * left.tile * right.tile * 4


def weight_gradient(
    x: Float[Array, "N ..."],
    dy: Float[Array, "N ..."],
    inputs: int = 1,
    outputs: int = 1,
    *,
    as_bits: bool = False,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "..."]:
    """Returns the gradient of a weight [*inputs, *outputs], summed over N steps, in float32.

    Args:
      x: [N, *rows, *inputs], the input that the weight was multiplied by in each step; *rows stands
        for the lanes and the rows of a lane.
      dy: [N, *rows, *outputs], the gradient of the product in each step.
      inputs, outputs: the numbers of the weight's input axes and of its output axes.
      as_bits: True if layers stored x as integers with x's bits. The kernel then reads these
        integers, so that XLA makes no floating-point copy.
      interpret: True runs the kernel on any device, slowly, and with any sizes.
    """
    left, right = _sides(x, dy, inputs, outputs)
    steps, rows = len(x), len(x) * left.lanes * left.rows
    xs = [dispatch.to_bits(part) if as_bits else part for part in jnp.unstack(x)]

    def side_spec(side: _Side, axis: int, **options: Any) -> pl.BlockSpec:
        """Returns the block spec with which a step of the grid reads its tile of one side.

        Args:
          side: the layout of the side.
          axis: the axis of the grid that counts the tiles of this side: 0 for the left side, 1 for
            the right side.
          options: further arguments of `pl.BlockSpec`.
        """

        def side_index(*tile: Any) -> tuple:
            """Returns the index, along A, B, H, R and K, of the tile of this side that a step of
            the grid reads.

            `tile` has the two indices of the step along the axes of the grid.
            """
            group, head, column = side.place(tile[axis])
            return group, 0, head, 0, column

        shape = None, side.lanes, side.heads, side.rows, side.columns
        return pl.BlockSpec(shape, side_index, **options)

    def output_index(i: Any, j: Any) -> tuple:
        """Returns the index of the output's block for tile i of the left side and tile j of the
        right side, along each axis of the output.

        The output has the axes [A, H, A', H', K, K'], where a prime marks the right side.
        """
        (a, h, k), (right_a, right_h, right_k) = left.place(i), right.place(j)
        return a, h, right_a, right_h, k, right_k

    tile = (None, left.heads, None, right.heads, left.columns, right.columns)
    gradient = pl.pallas_call(
        _kernel,
        grid=(left.tiles, right.tiles),
        in_specs=[
            [side_spec(left, 0, pipeline_mode=pl.Buffered(1))] * steps,
            [side_spec(right, 1)] * steps,
        ],
        out_specs=pl.BlockSpec(tile, output_index),
        out_shape=jax.ShapeDtypeStruct(
            (*left.groups, *right.groups, left.width, right.width), jnp.float32
        ),
        name=f"weight_gradient_{rows}x{left.tile}x{right.tile}_{x.dtype}_"
        f"{left.tiles * right.tiles}_steps",
        interpret=interpret,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * math.prod((*left.groups, *right.groups, left.width, right.width)),
            transcendentals=0, bytes_accessed=x.nbytes + dy.nbytes,
        ),
    )(left.arrays_of_steps(xs), right.arrays_of_steps(jnp.unstack(dy)))  # fmt: skip
    ordered = gradient.transpose(0, 1, 4, 2, 3, 5)
    return ordered.reshape(*x.shape[x.ndim - inputs :], *dy.shape[dy.ndim - outputs :])


interpreted = functools.partial(weight_gradient, interpret=True)


def _kernel(x: list[Any], dy: list[Any], output: Any) -> None:
    lanes, left, right = x[0].shape[0], output.shape[0], output.shape[1]

    def as_numbers(x: Array) -> Array:
        """Returns x if x has floating-point numbers. If x has integers, returns the floating-point
        numbers with the same bits.
        """
        dtype = dy[0].dtype
        return x if x.dtype == dtype else dispatch.from_bits(x, dtype)

    for head in range(left):
        for other in range(right):
            pairs = zip(x, dy, strict=True)
            output[head, other] = sum(
                dot_float32(as_numbers(left_x[lane, head]), right_dy[lane, other], TN)
                for left_x, right_dy in pairs
                for lane in range(lanes)
            )
