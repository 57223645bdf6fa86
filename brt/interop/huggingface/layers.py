"""Parameters by layer, as files have them, and stacked, as models do."""

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict


def by_layer(params: Mapping[str, Any]) -> dict[str, Any]:
    """A tree's arrays, or shapes, by names as "encoder/layers_0/mlp/wi/kernel"."""
    found = {}
    for name, leaf in flatten_dict(dict(params), sep="/").items():
        if "/layers/" not in name:
            found[name] = leaf
            continue
        for i in range(leaf.shape[0]):
            found[name.replace("/layers/", f"/layers_{i}/")] = _row(leaf, i)
    return found


def _row(leaf: Any, i: int) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
    return leaf[i]


def stacked(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The way back, to a tree."""
    flat, rows = {}, {}
    for name, array in arrays.items():
        if layer := re.search(r"/layers_(\d+)/", name):
            rows.setdefault(name.replace(layer[0], "/layers/"), {})[int(layer[1])] = array
        else:
            flat[name] = array
    for name, own in rows.items():
        flat[name] = jnp.stack([own[i] for i in range(len(own))])
    return unflatten_dict(flat, sep="/")
