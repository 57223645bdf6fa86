"""Reads the arrays of a checkpoint into the memory of devices."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np

from brt.checkpointing import stored as store

_THREADS = 4  # This number of arrays is read at a time.


def read(path: Path, stored: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Reads arrays of a checkpoint, after they were read in a child process with bounds.

    Args:
      path: the directory of a checkpoint that Orbax wrote, `state` or `frozen`.
      stored: the shape, dtype and sharding of every array to read, by the array's name. Arrays
        without elements are not allowed, because Orbax does not store them.

    Returns:
      The arrays, by name.

    Raises:
      ValueError: an array is missing, or is not stored as it should be.
    """
    described = {name: ([*leaf.shape], np.dtype(leaf.dtype).name) for name, leaf in stored.items()}
    store.check(path, described)

    def read_one(name: str) -> jax.Array:
        array, leaf = store.open_array(path, name, *described[name]), stored[name]
        return jax.make_array_from_callback(
            leaf.shape, leaf.sharding, lambda part: array[part].read().result(), dtype=leaf.dtype
        )

    with ThreadPoolExecutor(_THREADS, "arrays") as pool:
        return dict(zip(stored, pool.map(read_one, stored), strict=True))
