"""Kernels by head, as the matrices that optimizers take them for."""

import math
from collections.abc import Mapping

from jaxtyping import Array

from brt.distributed.rules import Names

# Of every parameter by its path, the names of its axes.
Axes = Mapping[str, Names]

_MERGED = ("heads", "whole_heads", "stack", "head_dim")  # axes that make one of a matrix


def matrix_shape(axes: Names, shape: tuple[int, ...]) -> tuple[int, ...]:
    """[D, H, K] -> [D, HK], [n, H, K, D] -> [HnK, D]: a kernel by head as a matrix."""
    if "head_dim" not in axes:
        return shape
    merged = _merged(axes)
    first, last = merged.start, merged.stop
    return (*shape[:first], math.prod(shape[first:last]), *shape[last:])


def matrix_names(axes: Names) -> Names:
    """The names of a matrix's axes: what was merged is cut as its heads were."""
    if "head_dim" not in axes:
        return axes
    merged = _merged(axes)
    heads = "heads" if "heads" in axes else None
    return (*axes[: merged.start], heads, *axes[merged.stop :])


def as_matrix(axes: Names, x: Array) -> Array:
    """A kernel as a matrix; heads first, so that who has some of them has rows that adjoin."""
    return x.transpose(_order(axes)).reshape(matrix_shape(axes, x.shape)) if axes else x


def from_matrix(axes: Names, matrix: Array, shape: tuple[int, ...]) -> Array:
    """The inverse of `as_matrix`; `shape` is that of the kernel."""
    if not axes:
        return matrix
    order = _order(axes)
    moved = matrix.reshape([shape[i] for i in order])
    return moved.transpose(sorted(range(len(order)), key=order.__getitem__))


def _merged(axes: Names) -> slice:
    places = [i for i, name in enumerate(axes) if name in _MERGED]
    return slice(places[0], places[-1] + 1)


def _order(axes: Names) -> list[int]:
    order = list(range(len(axes)))
    if "heads" in axes and "head_dim" in axes:
        merged = _merged(axes)
        order.insert(merged.start, order.pop(axes.index("heads")))
    return order
