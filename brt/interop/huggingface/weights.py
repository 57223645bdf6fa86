"""Converts arrays of Hugging Face's models to brt's parameters and back.

Hugging Face stores matrices as [out, in]. brt's kernels are [*in, *out], with a separate axis for
heads, and brt stacks the parameters of several layers on axis 0. In names of variables, `ours`
stands for brt and `theirs` for Hugging Face. Parameters are named by their paths, such as
"encoder/layers/mlp/wi/kernel".
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from brt.errors import CheckpointError
from brt.formatting import listed

Arrays = Mapping[str, np.ndarray]


class Place(NamedTuple):
    """The place of one parameter of brt in a checkpoint: the arrays that have its values.

    Attributes:
      leaf: the shape and dtype of the parameter.
      names: Hugging Face's names of the arrays. A parameter that is a stack has one array for each
        layer (and expert), and any other parameter has one array. The list is empty if Hugging
        Face's models have no such parameter.
      shape: the shape of each array.
      matrix: True if each array is a matrix [out, in], and the parameter has the axes [*in, *out].
    """

    leaf: jax.ShapeDtypeStruct
    names: list[str]
    shape: tuple[int, ...]
    matrix: bool = False


def kernels(leaf: jax.ShapeDtypeStruct, names: list[str], inputs: int, stacked: bool) -> Place:
    """Returns the place of a kernel. The inputs of the kernel have `inputs` axes, which come first.
    If `stacked` is True, `leaf` is a stack of such kernels, and the axis of layers precedes them.
    """
    shape = leaf.shape[1:] if stacked else leaf.shape
    sizes = math.prod(shape[inputs:]), math.prod(shape[:inputs])
    return Place(leaf, names, sizes, matrix=True)


def shapes(initial: Callable[[], Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes, by path, of the parameters that `initial` returns."""
    return flatten_dict(dict(nn.meta.unbox(jax.eval_shape(initial))), sep="/")


def import_arrays(
    arrays: Arrays, places: Mapping[str, Place], optional: Collection[str] = ()
) -> tuple[dict[str, jax.Array], dict[str, np.ndarray]]:
    """Returns float32 parameters made of the arrays of a checkpoint, and the arrays that belong to
    no parameter.

    `optional` names parameters that the result lacks if the checkpoint lacks their arrays.
    Raises CheckpointError if an array of any other parameter is missing, or if an array does not
    have the shape that its place requires.
    """
    unused, params, missing = dict(arrays), dict[str, jax.Array](), []
    for ours, place in places.items():
        absent = [name for name in place.names if name not in unused]
        if ours in optional and (absent or not place.names):
            continue
        if absent or not place.names:
            missing += absent or [ours]
            unused = {name: array for name, array in unused.items() if name not in place.names}
            continue
        rows = [_checked(name, unused.pop(name), place) for name in place.names]
        stacked = np.stack(rows) if len(rows) > 1 else rows[0]
        params[ours] = jnp.asarray(stacked.reshape(place.leaf.shape))
    if missing:
        found = f"; it has {listed(sorted(unused))} instead" if unused else ""
        raise CheckpointError(f"the checkpoint lacks {listed(missing)}{found}")
    return params, unused


def _checked(name: str, array: np.ndarray, place: Place) -> np.ndarray:
    if array.shape != place.shape:
        raise CheckpointError(f"{name} is {array.shape}, not {place.shape} as config.json has it")
    array = np.asarray(array, np.float32)
    return array.T if place.matrix else array


def export_arrays(
    params: Mapping[str, Any], places: Mapping[str, Place]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the parameters as arrays of a checkpoint: pairs of Hugging Face's name and the array
    in Hugging Face's layout. Raises CheckpointError if a parameter has no such name.
    """
    flat = flatten_dict(dict(params), sep="/")
    if nameless := [ours for ours in flat if not places[ours].names]:
        raise CheckpointError(f"Hugging Face has no names for {listed(nameless)}")
    for ours, array in flat.items():
        _, names, shape, is_matrix = places[ours]
        rows = np.asarray(array).reshape(len(names), *(shape[::-1] if is_matrix else shape))
        for name, row in zip(names, rows, strict=True):
            yield name, np.ascontiguousarray(row.T) if is_matrix else row
