"""Reshapes attention kernels to matrices, for optimizers that work on matrices.

Optimizers such as Muon and Adafactor treat the two axes of a matrix differently. Attention kernels
have more than two axes: D (the model dimension), H (heads), K (the dimension of a head), and n if
several kernels are stacked. H, K and n are merged into one axis, so that [n, H, K, D] becomes [HnK,
D], and [D, H, K] becomes [D, HK]. The functions get the names of a kernel's axes.
"""

import math
from collections.abc import Mapping

from jaxtyping import Array

from brt.distributed.rules import STACKS, Names

# `Axes` maps the path of every parameter to the names of the parameter's axes.
Axes = Mapping[str, Names]

# Axes whose names are in _MERGED are merged into one axis of the matrix.
_HEADS = ("heads", "kv_heads")
_MERGED = (*_HEADS, "whole_heads", "stack", "head_dim")

# A parameter that has an axis with one of these names is a table, whose rows are looked up and not
# multiplied.
TABLES = {"vocab", "states", "buckets", "positions", "types", "clusters"}


def is_kernel(axes: Names) -> bool:
    """Returns True if a parameter is the kernel of a linear map, or a stack of such kernels.

    The kernels of a stack belong to different layers or experts. Tables and routers do not count.
    """
    names = [name for name in matrix_names(axes) if name not in STACKS]
    return len(names) == 2 and not TABLES & set(names)


def matrix_shape(axes: Names, shape: tuple[int, ...]) -> tuple[int, ...]:
    if "head_dim" not in axes:
        return shape
    merged = _merged(axes)
    first, last = merged.start, merged.stop
    return (*shape[:first], math.prod(shape[first:last]), *shape[last:])


def matrix_names(axes: Names) -> Names:
    """Returns the names of the axes that a kernel has after it was reshaped to a matrix.

    The merged axis has the name of the axis of heads ("heads" or "kv_heads"), so that it is sharded
    like that axis. If the kernel has no axis of heads, the name is None.
    """
    if "head_dim" not in axes:
        return axes
    merged = _merged(axes)
    heads = next((name for name in _HEADS if name in axes), None)
    return (*axes[: merged.start], heads, *axes[merged.stop :])


def ends_with_heads(axes: Names) -> bool:
    """Returns True if `as_matrix` only merges the last axes of a kernel, such as [D, H, K]."""
    return axes[-1:] == ("head_dim",) and _order(axes) == list(range(len(axes)))


def as_matrix(axes: Names, x: Array) -> Array:
    """Returns a kernel, reshaped to a matrix; if `axes` is (), the array is returned unchanged.

    The merged axis contains one head after the other, so that a device with some of the heads has
    adjacent rows or columns of the matrix.
    """
    return x.transpose(_order(axes)).reshape(matrix_shape(axes, x.shape)) if axes else x


def from_matrix(axes: Names, matrix: Array, shape: tuple[int, ...]) -> Array:
    """Reshapes a matrix back to a kernel of the shape `shape`; the inverse of `as_matrix`."""
    if not axes:
        return matrix
    order = _order(axes)
    permuted = matrix.reshape([shape[i] for i in order])
    return permuted.transpose(sorted(range(len(order)), key=order.__getitem__))


def _merged(axes: Names) -> slice:
    places = [i for i, name in enumerate(axes) if name in _MERGED]
    return slice(places[0], places[-1] + 1)


def _order(axes: Names) -> list[int]:
    """Returns the permutation that moves the axis of heads to the front of the merged axes."""
    order = list(range(len(axes)))
    heads = next((name for name in _HEADS if name in axes), None)
    if heads and "head_dim" in axes:
        merged = _merged(axes)
        order.insert(merged.start, order.pop(axes.index(heads)))
    return order
