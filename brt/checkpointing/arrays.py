"""Reads the arrays of a checkpoint into the memory of devices."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from brt.checkpointing import stored as store

_THREADS = 4  # This number of arrays is read at a time.


def read(path: Path, stored: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Reads arrays of a checkpoint, after they were read in a child process with bounds.

    `path` is the directory `state` or `frozen`. `stored` has the shape and dtype of every array to
    read, and its sharding (without one: the default device). ValueError is raised if an array is
    missing, or is not stored as it should be.
    """
    described = {name: ([*leaf.shape], np.dtype(leaf.dtype).name) for name, leaf in stored.items()}
    # Orbax does not store arrays without elements.
    store.check(path, {name: described[name] for name, leaf in stored.items() if leaf.size})
    default = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def read_one(name: str) -> jax.Array:
        leaf = stored[name]
        sharding = getattr(leaf, "sharding", None) or default
        if not leaf.size:
            return jax.device_put(jnp.zeros(leaf.shape, leaf.dtype), sharding)
        array = store.open_array(path, name, *described[name])
        return jax.make_array_from_callback(
            leaf.shape, sharding, lambda part: array[part].read().result(), dtype=leaf.dtype
        )

    with ThreadPoolExecutor(_THREADS, "arrays") as pool:
        return dict(zip(stored, pool.map(read_one, stored), strict=True))
