"""Transposes that are stored in memory, for XLA's CPU backend.

That backend can fuse a transpose with a computation. The loop of the fusion then reads the array
against its memory order. A separate copy is three to eight times as fast. On other backends, and
where an array is sharded, a transpose is only followed by an optimization barrier: to constrain the
layout of a sharded array, XLA would gather the array on every device.
"""

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float

from brt.distributed.rules import partitioned
from brt.ops import dispatch


def row_major(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns x, stored in memory. On CPUs, the order is row-major unless arrays are sharded."""
    if _compiler_chooses_order():
        return jax.lax.optimization_barrier(x)
    return jax.lax.optimization_barrier(with_layout_constraint(x, Layout(tuple(range(x.ndim)))))


def transpose_copy(x: Float[Array, "..."], *axes: int) -> Float[Array, "..."]:
    """Returns x.transpose(axes), stored in memory; the backward pass stores the gradient, too."""
    if _compiler_chooses_order():
        return jax.lax.optimization_barrier(x.transpose(axes))
    return row_major(row_major(x).transpose(axes))


def swapaxes_copy(x: Float[Array, "..."], one: int, other: int) -> Float[Array, "..."]:
    axes = list(range(x.ndim))
    axes[one], axes[other] = axes[other], axes[one]
    return transpose_copy(x, *axes)


def transposed(x: Float[Array, "*B M N"]) -> Float[Array, "*B N M"]:
    return swapaxes_copy(x, -1, -2)


def _compiler_chooses_order() -> bool:
    return dispatch.policy().orders_memory or partitioned()
