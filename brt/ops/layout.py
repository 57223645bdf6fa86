"""Transposes that are stored in memory, for XLA's CPU backend.

XLA's CPU backend copies an array in transposed order three to eight times as fast by itself as
in a loop that also computes something and reads the array against its memory order. The functions
of this module therefore put a layout constraint and an optimization barrier around a transpose.
They transpose without a constraint on other backends, and where an array is sharded over devices,
because XLA would gather a sharded array to give it one memory order.
"""

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float

from brt.distributed.rules import partitioned
from brt.ops import dispatch


def row_major(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns x after an optimization barrier that stores it in row-major order."""
    if _compiler_chooses_order():
        return jax.lax.optimization_barrier(x)
    return jax.lax.optimization_barrier(with_layout_constraint(x, Layout(tuple(range(x.ndim)))))


def transpose_copy(x: Float[Array, "..."], *axes: int) -> Float[Array, "..."]:
    """Returns x.transpose(axes), stored in memory; the backward pass stores its transpose, too."""
    if _compiler_chooses_order():
        return jax.lax.optimization_barrier(x.transpose(axes))
    return row_major(row_major(x).transpose(axes))


def swapaxes_copy(x: Float[Array, "..."], one: int, other: int) -> Float[Array, "..."]:
    """Returns x.swapaxes(one, other), stored in memory."""
    axes = list(range(x.ndim))
    axes[one], axes[other] = axes[other], axes[one]
    return transpose_copy(x, *axes)


def transposed(x: Float[Array, "*B M N"]) -> Float[Array, "*B N M"]:
    """Returns the transpose of each matrix in x, stored in memory."""
    return swapaxes_copy(x, -1, -2)


def _compiler_chooses_order() -> bool:
    """Returns True if the compiler, not this module, chooses the memory order of arrays."""
    return dispatch.policy().orders_memory or partitioned()
