"""Converts Hugging Face's arrays of encoder-decoders and encoders to brt's parameters and back.

Hugging Face stores matrices as [out, in]. brt's kernels are [*in, *out], with a separate axis for
heads. In names of variables, `ours` stands for brt and `theirs` for Hugging Face.

Models have stacked parameters: the arrays of all layers are one array with the layers on axis 0.
Files have parameters by layer: each layer has arrays of its own.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from brt.errors import CheckpointError
from brt.formatting import listed
from brt.interop.exporting import Described

Arrays = Mapping[str, np.ndarray]
_LEAVES = {"kernel": "weight", "embedding": "weight", "scale": "weight", "bias": "bias"}


def array_names(modules: Mapping[str, str]) -> dict[str, str]:
    """Returns Hugging Face's names of the arrays of modules by brt's names; `modules` has Hugging
    Face's name of each module by brt's name.
    """
    return {
        f"{ours}/{leaf}": f"{theirs}.{suffix}"
        for ours, theirs in modules.items()
        for leaf, suffix in _LEAVES.items()
    }


def by_layer(params: Mapping[str, Any]) -> dict[str, Any]:
    """Splits stacked parameters, or their shapes (`jax.ShapeDtypeStruct`), and returns those of
    each layer by names such as "encoder/layers_0/mlp/wi/kernel".
    """
    arrays = {}
    for name, leaf in flatten_dict(dict(params), sep="/").items():
        if "/layers/" not in name:
            arrays[name] = leaf
            continue
        for i in range(leaf.shape[0]):
            arrays[name.replace("/layers/", f"/layers_{i}/")] = _row(leaf, i)
    return arrays


def _row(leaf: Any, i: int) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
    return leaf[i]


def stack_layers(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Stacks the arrays of all layers to a nested dictionary; the inverse of `by_layer`."""
    flat, rows = {}, {}
    for name, array in arrays.items():
        if layer := re.search(r"/layers_(\d+)/", name):
            rows.setdefault(name.replace(layer[0], "/layers/"), {})[int(layer[1])] = array
        else:
            flat[name] = array
    for name, layers in rows.items():
        flat[name] = jnp.stack([layers[i] for i in range(len(layers))])
    return unflatten_dict(flat, sep="/")


def _their_name(names: Mapping[str, str], ours: str) -> str | None:
    # Returns None if a parameter such as "encoder/layers_0/mlp/wi/kernel" has no counterpart.
    layer = re.search(r"layers_(\d+)", ours)
    pattern = names.get(re.sub(r"layers_\d+", "layers_{i}", ours))
    return None if pattern is None else pattern.format(i=layer[1] if layer else "")


def _their_shape(ours: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    # `shape` is that of one layer's parameter in brt.
    if ours.endswith("kernel"):
        inputs = 2 if ours.endswith("/o/kernel") else 1
        return math.prod(shape[inputs:]), math.prod(shape[:inputs])
    if ours == "logits_bias":
        return (1, *shape)
    if len(shape) == 0 or ours.endswith("/bias"):
        return (math.prod(shape),)
    return shape


class Imported(NamedTuple):
    """Imported parameters, and the names of parameters and arrays that have no counterpart.

    Attributes:
      params: the float32 parameters, a nested dictionary with brt's names.
      initialised: brt's names of the parameters that the checkpoint lacks and that were therefore
        initialised, such as those of a kind of cross-attention that transformers does not have.
      unexpected: Hugging Face's names of the arrays that have no counterpart in brt.
    """

    params: dict[str, Any]
    initialised: list[str]
    unexpected: list[str]


def template(described: Described) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the parameters' shapes, by names like "encoder/layers_0/mlp/wi/kernel"."""
    return by_layer(jax.eval_shape(described.initial_params))


def import_arrays(arrays: Arrays, described: Described) -> Imported:
    """Converts the arrays of a checkpoint, with the names that current versions of transformers
    use, to brt's parameters. Raises CheckpointError if a required array is missing, or an array has
    another shape.
    """
    names, left = described.parameter_names(), dict(arrays)
    params, missing, initialised = {}, [], []
    for ours, leaf in template(described).items():
        theirs = _their_name(names, ours)
        if theirs not in left:
            optional = described.may_lack(ours)
            (initialised if optional else missing).append(ours if optional else str(theirs))
            continue
        array, shape = left.pop(theirs), _their_shape(ours, leaf.shape)
        if array.shape != shape:
            raise CheckpointError(f"{theirs} is {array.shape}, not {shape} as config.json has it")
        array = array.T if ours.endswith("kernel") else array
        params[ours] = jnp.asarray(array.reshape(leaf.shape), jnp.float32)
    if missing:
        raise CheckpointError(f"the checkpoint lacks {listed(missing)}")
    tree = stack_layers({**params, **_initialise(described, initialised)})
    return Imported(tree, initialised, sorted(left))


def _initialise(described: Described, wanted: list[str]) -> dict[str, jax.Array]:
    if not wanted:
        return {}
    initial = lambda: by_layer(described.initial_params()).items()  # noqa: E731
    return jax.jit(lambda: {name: x for name, x in initial() if name in wanted})()


def adapt(params: dict[str, Any], described: Described) -> dict[str, Any]:
    """Returns the parameters of another model for the model that `described` describes.
    Those that `params` lacks are initialised, and those that are not needed are left out.
    """
    have, want = by_layer(params), template(described)
    new = _initialise(described, [name for name in want if name not in have])
    return stack_layers({**{name: have[name] for name in want if name in have}, **new})


def export_arrays(params: Mapping[str, Any], described: Described) -> dict[str, np.ndarray]:
    """Returns the parameters of a model as arrays with Hugging Face's names and layouts."""
    known, result, nameless = described.parameter_names(), {}, []
    for ours, array in by_layer(params).items():
        theirs, array = _their_name(known, ours), np.asarray(array)
        shape = _their_shape(ours, array.shape)
        if theirs is None:
            nameless.append(ours)
        elif ours.endswith("kernel"):
            result[theirs] = np.ascontiguousarray(array.reshape(shape[::-1]).T)
        else:
            result[theirs] = array.reshape(shape)
    if nameless:
        raise CheckpointError(f"Hugging Face has no names for {listed(nameless)}")
    return described.with_copies(result)


def mismatches(imported: Imported) -> Iterator[str]:
    """Yields lines of a report for the user, which name the parameters that the checkpoint lacked
    and the arrays that the model does not use.
    """
    for what, names_of_arrays in (
        ("initialised, as the checkpoint lacks them", imported.initialised),
        ("not read, as the model has no use for them", imported.unexpected),
    ):
        if names_of_arrays:
            yield f"{what}: {', '.join(names_of_arrays)}"
