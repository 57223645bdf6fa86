"""The arrays of a state by name: what a checkpoint stores, compares and hashes.

A name is the path from the root, as in `params/decoder/embedding`; dictionaries,
tuples and NamedTuples may nest in any way. A state is a pytree of arrays.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Description = dict[str, dict[str, Any]]  # {name: {"dtype": "float32", "shape": [8, 8]}}

# What NumPy itself can check; there are others, such as those of eight bits.
_OF_NUMPY = {np.dtype(name) for name in ("float16", "float32", "float64", jnp.bfloat16)}

HASHED_META = ("step", "data", "seed")


def named(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their path, in the order of `jax.tree.leaves`."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree)
    leaves = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in pairs}
    if len(leaves) != len(pairs):
        raise ValueError("two leaves of the state have the same path")
    return leaves


def describe(leaves: Mapping[str, Any]) -> Description:
    """Data type and shape of every leaf, as JSON; leaves may be abstract."""
    return {
        name: {"dtype": str(np.dtype(leaf.dtype)), "shape": list(leaf.shape)}
        for name, leaf in leaves.items()
    }


def abstract(description: Description) -> dict[str, jax.ShapeDtypeStruct]:
    """The inverse of `describe`: a flat target that restores to a dictionary by name."""
    return {
        name: jax.ShapeDtypeStruct(entry["shape"], jnp.dtype(entry["dtype"]))
        for name, entry in description.items()
    }


def differences(saved: Description, wanted: Description, *, partial: bool = False) -> list[str]:
    """How a checkpoint's leaves differ from a model's, one phrase per leaf.

    Args:
      partial: leaves that only the checkpoint has are no difference.
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
    """Names of the leaves that hold NaN or infinity."""
    names = [name for name, leaf in leaves.items() if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    if not names:
        return []
    arrays = [leaves[name] for name in names]
    # The host reads arrays in its own memory where they are, which needs no program to be compiled.
    finite = _finite_on_host(arrays) if all(map(_on_host, arrays)) else _all_finite(arrays)
    return [name for name, good in zip(names, np.asarray(finite), strict=True) if not good]


def _on_host(array: Any) -> bool:
    """Whether this process can check the whole array without copying it from a device."""
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
    """Bytes of a state's arrays, abstract or not; about what a checkpoint takes on disk."""
    return sum(leaf.size * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(state))


def state_hash(state: Any, meta: Mapping[str, Any]) -> str:
    """One sha256 over all that a resume restores; equal hashes mean the same run.

    It covers the name, type, shape and bytes of every leaf and `HASHED_META` of `meta`,
    and depends neither on sharding nor on the kinds of containers in the tree.
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
