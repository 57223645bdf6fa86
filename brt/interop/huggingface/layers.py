"""Converts parameters between stacked parameters and parameters by layer.

Models have stacked parameters: the arrays of all layers are one array with the layers on axis 0.
Files have parameters by layer: each layer has arrays of its own.
"""

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict


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
