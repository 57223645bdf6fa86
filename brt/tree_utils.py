"""Gives names to the arrays of a state; checkpoints store, compare and hash arrays by name.

A name is the path from the root, such as `params/decoder/embedding`. A state is a pytree of
dictionaries, tuples and NamedTuples of arrays. Its arrays are called leaves.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# A Description has the dtype and shape of each array, such as
# {name: {"dtype": "float32", "shape": [8, 8]}}.
Description = dict[str, dict[str, Any]]

# NumPy's isfinite supports these floating-point dtypes, but no dtype of eight bits.
_OF_NUMPY = {np.dtype(name) for name in ("float16", "float32", "float64", jnp.bfloat16)}

HASHED_META = ("step", "data", "seed")  # entries of a checkpoint's metadata, see `state_hash`


def named(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a tree by their names, in the order of `jax.tree.leaves`."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree)
    leaves = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in pairs}
    if len(leaves) != len(pairs):
        raise ValueError("two leaves of the state have the same path")
    return leaves


def describe(leaves: Mapping[str, Any]) -> Description:
    """Returns the dtype and shape of every leaf (array or `jax.ShapeDtypeStruct`) as JSON."""
    return {
        name: {"dtype": str(np.dtype(leaf.dtype)), "shape": list(leaf.shape)}
        for name, leaf in leaves.items()
    }


def abstract(description: Description) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the arrays by name as `jax.ShapeDtypeStruct`; the inverse of `describe`."""
    return {
        name: jax.ShapeDtypeStruct(entry["shape"], jnp.dtype(entry["dtype"]))
        for name, entry in description.items()
    }


def differences(saved: Description, wanted: Description, *, partial: bool = False) -> list[str]:
    """Returns a phrase for each difference between the leaves of a checkpoint and of a model.

    If `partial` is True, leaves that only the checkpoint has are ignored.
    """
    phrases = [
        f"{name} is {_shape(saved[name])} in the checkpoint and {_shape(wanted[name])} here"
        for name in wanted
        if name in saved and saved[name] != wanted[name]
    ]
    phrases += [f"{name} is not in the checkpoint" for name in wanted if name not in saved]
    if not partial:
        phrases += [f"{name} is only in the checkpoint" for name in saved if name not in wanted]
    return phrases


def not_finite(leaves: Mapping[str, Any]) -> list[str]:
    """Returns the names of the leaves (arrays by name) that contain NaN or infinity."""
    names = [name for name, leaf in leaves.items() if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    if not names:
        return []
    arrays = [leaves[name] for name in names]
    # Arrays in host memory are checked by NumPy, which reads them without compiling a program.
    finite = _finite_on_host(arrays) if all(map(_on_host, arrays)) else _all_finite(arrays)
    return [name for name, good in zip(names, np.asarray(finite), strict=True) if not good]


def _on_host(array: Any) -> bool:
    """Returns True if this process can check the whole array without copying it from a device."""
    if np.dtype(array.dtype) not in _OF_NUMPY:
        return False
    if not isinstance(array, jax.Array):
        return True
    return array.is_fully_addressable and all(d.platform == "cpu" for d in array.devices())


def _finite_on_host(arrays: Sequence[Any]) -> list[bool]:
    return [bool(np.isfinite(np.asarray(array)).all()) for array in arrays]


@jax.jit
def _all_finite(arrays: Sequence[jax.Array]) -> jax.Array:
    return jnp.stack([jnp.isfinite(array).all() for array in arrays])


def required_bytes(state: Any) -> int:
    """Returns the size of a state's arrays in bytes, about the size of a checkpoint on disk."""
    return sum(leaf.size * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(state))


def state_hash(state: Any, meta: Mapping[str, Any]) -> str:
    """Returns a SHA-256 of everything that resuming restores; equal hashes mean equal runs.

    The hash covers the name, dtype, shape and bytes of every leaf, and those entries of `meta`
    whose keys are in `HASHED_META`. It does not depend on how arrays are sharded or on the kinds of
    containers in the tree.
    """
    total = hashlib.sha256()
    selected = {key: meta[key] for key in HASHED_META}
    total.update(json.dumps(selected, sort_keys=True, allow_nan=False).encode())
    for name, leaf in sorted(named(state).items()):
        total.update(f"\n{name} {leaf.dtype} {list(leaf.shape)}\n".encode())
        total.update(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data)
    return total.hexdigest()


def _shape(entry: Mapping[str, Any]) -> str:
    return f"{entry['dtype']}[{','.join(map(str, entry['shape']))}]"
