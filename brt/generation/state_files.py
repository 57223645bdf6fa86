"""Files that store the memory of a generating session, so that a text can be continued later."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from brt import durable, untrusted
from brt.errors import DataError
from brt.generation.memory import unfinished_character

_IDENTITY = 1 << 20  # The description of the model in a file has at most this many bytes.


def _swap_lanes_and_layers(memory: Any) -> Any:
    """Swaps the axes of lanes and layers of the open block's arrays; files have lanes first."""
    return memory._replace(block=jax.tree.map(lambda x: x.swapaxes(0, 1), memory.block))


def save(memory: Any, path: Path, identity: Mapping[str, object]) -> None:
    """Writes a `brt.generation.memory.Memory` to an .npz file, with a description of its model."""
    arrays = {
        f"leaf{i}": np.asarray(leaf, _file_dtype(leaf.dtype))
        for i, leaf in enumerate(jax.tree.leaves(_swap_lanes_and_layers(memory)))
    }
    with durable.named_by_user(path) as file:
        np.savez_compressed(file, identity=np.array(json.dumps(identity)), **arrays)


def load(
    path: Path,
    old: Any,
    block_length: int,
    identity: Mapping[str, object],
) -> Any:
    """Returns the memory in a file that `save` wrote, with the shapes and dtypes of `old`.

    A file that is missing or damaged, or whose `identity` differs, raises DataError.
    """
    leaves, structure = jax.tree.flatten(_swap_lanes_and_layers(old))
    try:
        with untrusted.npz(path, growth=None) as arrays:
            stored = _described(arrays, len(leaves))
            saved_identity = untrusted.parse_json(str(arrays["identity"].read()))
            untrusted.check(saved_identity, {str: object})
            _check_identity(path, saved_identity, identity)
            if [array.shape for array in stored] != [leaf.shape for leaf in leaves]:
                raise DataError(f"{path} holds arrays of other shapes; load it with as many lanes")
            loaded = [_leaf(*pair) for pair in zip(stored, leaves, strict=True)]
        memory = jax.tree.unflatten(structure, loaded)
        if memory.count < 0 or not 0 <= memory.position < block_length:
            raise ValueError("its position or count is out of range")
        if any(data != unfinished_character(data) for data in memory.unfinished_bytes()):
            raise ValueError("its bytes do not begin a character")
    except FileNotFoundError as error:
        raise DataError(f"there is no state file {path}") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"{path} is no state that --save_state wrote, or it is damaged; name such a file "
            "with --load_state"
        ) from error
    return _swap_lanes_and_layers(memory)


def _described(arrays: Mapping[str, untrusted.LazyArray], leaves: int) -> list[Any]:
    """Returns the arrays of the memory, none of which is read."""
    # The file must not have other arrays, or a long description of the model.
    names = [f"leaf{i}" for i in range(leaves)]
    if {*arrays} - {*names, "identity"}:
        raise ValueError("it has other arrays")
    text = arrays["identity"]
    if text.dtype.kind != "U" or text.shape or text.dtype.itemsize > _IDENTITY:
        raise ValueError("it describes its model with another array than a short text")
    return [arrays[name] for name in names]


def _check_identity(
    path: Path, saved: Mapping[str, object], identity: Mapping[str, object]
) -> None:
    different = [k for k in {**identity, **saved} if saved.get(k) != identity.get(k)]
    if different:
        facts = [f"{k} was {saved.get(k)} and is {identity.get(k)}" for k in different[:4]]
        if len(different) > len(facts):
            facts.append(f"{len(different) - len(facts)} more")
        raise DataError(f"{path} belongs to another model: {', '.join(facts)}")


def _leaf(stored: untrusted.LazyArray, old: Array) -> Array:
    """Returns a saved array of the memory; raises ValueError if its dtype or values are invalid."""
    if stored.dtype != _file_dtype(old.dtype):
        raise ValueError(f"it has {stored.dtype} for {old.dtype}")
    array = stored.read()
    if not (array >= 0 if array.dtype.kind == "i" else np.isfinite(array)).all():
        raise ValueError("it has numbers that are not finite")
    return jnp.asarray(array, old.dtype)


def _file_dtype(dtype: np.dtype) -> np.dtype:
    """Returns the dtype in the file: float32 for bfloat16, which NumPy's file format lacks."""
    return np.dtype("float32") if dtype == jnp.bfloat16 else dtype
