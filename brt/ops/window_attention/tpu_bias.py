"""Pallas kernels for TPUs that compute the bias tile of window attention, and its gradient.

The tile has the bias of W slots (keys) for the first R rows (queries) of a block; `pallas_tpu`
defines slots. Column r of the tile is the bias vector shifted by r slots. XLA would build such a
tile by padding and slicing a repeated vector. The kernel instead rolls column r by each power of
two in the binary representation of r; rolls by eight or more slots move complete vector registers.
A step of the grid computes the tile of one head.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from brt.ops.tpu import LANES, parallel_heads

_SUBLANES = 8  # A register of 32-bit numbers has this many sublanes.


def bias_tile(
    bias: Float[Array, "H W"],
    rows: int,
    attend_to_self: bool,
    interpret: bool | pltpu.InterpretParams,
) -> Float[Array, "H W R"]:
    """Returns the bias of each slot and row.

    The key in slot c of row r is at the distance (r - c) mod W, or W instead of 0 if a token does
    not see itself. In `bias`, the nearest key is the first.
    """
    heads, window = bias.shape
    name = f"bias_tile_{window}x{rows}"
    kernel = functools.partial(_tile_kernel, first=int(attend_to_self))
    return _call(kernel, name, bias[:, None, ::-1], (heads, window, rows), interpret)


def bias_gradient(
    d_tile: Float[Array, "H W R"], attend_to_self: bool, interpret: bool | pltpu.InterpretParams
) -> Float[Array, "H W"]:
    """Returns the gradient of the bias, float32, from the gradient of `bias_tile`."""
    heads, window, rows = d_tile.shape
    name = f"bias_gradient_{window}x{rows}"
    kernel = functools.partial(_gradient_kernel, first=int(attend_to_self))
    return _call(kernel, name, d_tile, (heads, 1, window), interpret)[:, 0, ::-1]


def _call(
    kernel: Any, name: str, x: Float[Array, "H ..."], shape: tuple[int, int, int], interpret: Any
) -> Float[Array, "H ..."]:
    """Calls a kernel with one step per head."""

    def head_spec(shape: tuple[int, ...]) -> pl.BlockSpec:
        return pl.BlockSpec((None, *shape[1:]), lambda h: (h, 0, 0))

    return pl.pallas_call(
        kernel, grid=(len(x),), in_specs=[head_spec(x.shape)], out_specs=head_spec(shape),
        out_shape=jax.ShapeDtypeStruct(shape, jnp.float32),
        # The name tells `brt.planning.kernel_cycles` which kernel it is, and how many steps it has.
        name=f"{name}_float32_{len(x)}_steps",
        interpret=interpret, compiler_params=parallel_heads(1),
    )(x)  # fmt: skip


def _roll_columns(x: Float[Array, "W R"], sign: int) -> Float[Array, "W R"]:
    """Rolls column r by r slots."""
    window, rows = x.shape
    column = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    shift = 1
    while shift < rows:
        x = jnp.where(column & shift != 0, pltpu.roll(x, sign * shift % window, 0), x)
        shift *= 2
    return x


def _roll_row(row: Float[Array, "1 W"], slots: int) -> Float[Array, "1 W"]:
    """Rolls a row; only complete registers can be rolled, so the row is broadcast to one."""
    if not slots:
        return row
    register = jnp.broadcast_to(row, (_SUBLANES, row.shape[1]))
    return pltpu.roll(register, slots % row.shape[1], 1)[:1]


def _tile_kernel(bias: Any, results: Any, *, first: int) -> None:
    """Writes the tile; `bias` has the farthest key first, which is in slot `first` of row 0."""
    window, rows = results.shape
    columns = math.gcd(rows, LANES)
    x = _roll_columns(jnp.broadcast_to(_roll_row(bias[...], first), (columns, window)).T, 1)
    for i in range(0, rows, columns):
        results[:, i : i + columns] = x if not i else jnp.concatenate([x[-i:], x[:-i]], axis=0)


def _gradient_kernel(d_tile: Any, results: Any, *, first: int) -> None:
    results[...] = _roll_row(
        jnp.sum(_roll_columns(d_tile[...], -1).T, axis=0, keepdims=True), -first
    )
