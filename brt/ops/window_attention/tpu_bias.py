"""The bias of a block's first rows on TPUs: one row of numbers, shifted by one more a row.

The compiler makes such a tile by pads and slices of a row repeated; here every row is rolled by
the bits of its index, of which all from eight on move whole registers.
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

_SUBLANES = 8  # of a register of 32-bit numbers


def tile(
    bias: Float[Array, "H W"],
    rows: int,
    attend_to_self: bool,
    interpret: bool | pltpu.InterpretParams,
) -> Float[Array, "H W R"]:
    """Of slots x rows: that of row r and slot c is of the distance r - c, or that and the window.

    Args:
      bias: nearest first; the nearest is the token itself, or the one before it.
    """
    heads, window = bias.shape
    name = f"bias_tile_{window}x{rows}"
    kernel = functools.partial(_tile_kernel, first=int(attend_to_self))
    return _call(kernel, name, bias[:, None, ::-1], (heads, window, rows), interpret)


def gradient(
    d_tile: Float[Array, "H W R"], attend_to_self: bool, interpret: bool | pltpu.InterpretParams
) -> Float[Array, "H W"]:
    """That of the bias, given that of its `tile`."""
    heads, window, rows = d_tile.shape
    name = f"bias_gradient_{window}x{rows}"
    kernel = functools.partial(_gradient_kernel, first=int(attend_to_self))
    return _call(kernel, name, d_tile, (heads, 1, window), interpret)[:, 0, ::-1]


def _call(
    kernel: Any, name: str, x: Float[Array, "H ..."], shape: tuple[int, int, int], interpret: Any
) -> Float[Array, "H ..."]:
    """The name is what `brt.planning.schedules` knows a kernel by, and how often its grid runs."""

    def of_head(shape: tuple[int, ...]) -> pl.BlockSpec:
        return pl.BlockSpec((None, *shape[1:]), lambda h: (h, 0, 0))

    return pl.pallas_call(
        kernel, grid=(len(x),), in_specs=[of_head(x.shape)], out_specs=of_head(shape),
        out_shape=jax.ShapeDtypeStruct(shape, jnp.float32),
        name=f"{name}_float32_{len(x)}_steps",
        interpret=interpret, compiler_params=parallel_heads(1),
    )(x)  # fmt: skip


def _rolled(x: Float[Array, "W R"], sign: int) -> Float[Array, "W R"]:
    """Column r by r slots."""
    window, rows = x.shape
    column = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    shift = 1
    while shift < rows:
        x = jnp.where(column & shift != 0, pltpu.roll(x, sign * shift % window, 0), x)
        shift *= 2
    return x


def _moved(row: Float[Array, "1 W"], slots: int) -> Float[Array, "1 W"]:
    """As a whole register, which is what can be rolled."""
    if not slots:
        return row
    register = jnp.broadcast_to(row, (_SUBLANES, row.shape[1]))
    return pltpu.roll(register, slots % row.shape[1], 1)[:1]


def _tile_kernel(bias: Any, found: Any, *, first: int) -> None:
    """The bias has the farthest first, which is that of the slot `first` of row 0."""
    window, rows = found.shape
    columns = math.gcd(rows, LANES)
    x = _rolled(jnp.broadcast_to(_moved(bias[...], first), (columns, window)).T, 1)
    for i in range(0, rows, columns):
        found[:, i : i + columns] = x if not i else jnp.concatenate([x[-i:], x[:-i]], axis=0)


def _gradient_kernel(d_tile: Any, found: Any, *, first: int) -> None:
    found[...] = _moved(jnp.sum(_rolled(d_tile[...], -1).T, axis=0, keepdims=True), -first)
