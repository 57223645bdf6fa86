"""Kernels by head, as the matrices that optimizers take them for."""

import math
from collections.abc import Mapping

# Of every parameter by its path, the names of its axes.
Axes = Mapping[str, tuple[str | None, ...]]

_MERGED = ("stack", "heads", "head_dim")  # axes of kernels by head that make one of a matrix


def matrix_shape(axes: tuple[str | None, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """[D, H, K] -> [D, HK], [n, H, K, D] -> [nHK, D]: a kernel by head as a matrix."""
    if "head_dim" not in axes:
        return shape
    merged = [i for i, name in enumerate(axes) if name in _MERGED]
    first, last = merged[0], merged[-1] + 1
    return (*shape[:first], math.prod(shape[first:last]), *shape[last:])
