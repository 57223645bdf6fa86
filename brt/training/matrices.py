"""Views of kernels with an axis of heads as matrices, for optimizers that work on matrices."""

import math
from collections.abc import Mapping

from jaxtyping import Array

from brt.distributed.rules import Names

# The names of the axes of every parameter, by the parameter's path.
Axes = Mapping[str, Names]

# The names of the axes that are merged into one axis of the matrix.
_MERGED = ("heads", "whole_heads", "stack", "head_dim")


def matrix_shape(axes: Names, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of a kernel as a matrix: [D, H, K] -> [D, HK], [n, H, K, D] -> [HnK, D].

    Args:
      axes: names of the kernel's axes.
      shape: shape of the kernel.
    """
    if "head_dim" not in axes:
        return shape
    merged = _merged(axes)
    first, last = merged.start, merged.stop
    return (*shape[:first], math.prod(shape[first:last]), *shape[last:])


def matrix_names(axes: Names) -> Names:
    """Returns the names of the axes of a kernel as a matrix.

    The merged axis is called "heads" if the kernel has heads, and is then sharded as they are.
    """
    if "head_dim" not in axes:
        return axes
    merged = _merged(axes)
    heads = "heads" if "heads" in axes else None
    return (*axes[: merged.start], heads, *axes[merged.stop :])


def as_matrix(axes: Names, x: Array) -> Array:
    """Returns a kernel as a matrix.

    Heads come first within the merged axis, so that a device with some of the heads has adjacent
    rows of the matrix.
    """
    return x.transpose(_order(axes)).reshape(matrix_shape(axes, x.shape)) if axes else x


def from_matrix(axes: Names, matrix: Array, shape: tuple[int, ...]) -> Array:
    """Returns the kernel whose matrix is given; the inverse of `as_matrix`.

    Args:
      axes: names of the kernel's axes.
      matrix: result of `as_matrix`.
      shape: shape of the kernel.
    """
    if not axes:
        return matrix
    order = _order(axes)
    permuted = matrix.reshape([shape[i] for i in order])
    return permuted.transpose(sorted(range(len(order)), key=order.__getitem__))


def _merged(axes: Names) -> slice:
    """Returns the range of adjacent axes that are merged."""
    places = [i for i, name in enumerate(axes) if name in _MERGED]
    return slice(places[0], places[-1] + 1)


def _order(axes: Names) -> list[int]:
    """Returns the permutation that moves the axis of heads to the front of the merged axes."""
    order = list(range(len(axes)))
    if "heads" in axes and "head_dim" in axes:
        merged = _merged(axes)
        order.insert(merged.start, order.pop(axes.index("heads")))
    return order
