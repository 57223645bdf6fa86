"""Opens the arrays of a checkpoint, and tries them in a child process with bounds.

Orbax writes each array with Zarr 2: `.zarray` is JSON that describes the array, and each chunk is
a zstd stream. Both are entries of a key-value store (OCDBT), whose tree is compressed, too. What
brt reads is fixed here, and no file of the checkpoint chooses another format.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  # registers bfloat16 with NumPy
import numpy as np
import tensorstore

from brt import bounded, untrusted
from brt.checkpointing import manifest

_SECONDS_PER_GB = 20


def open_array(directory: Path, name: str, shape: list[int], dtype: str) -> Any:
    """Opens an array that Orbax wrote, as a `tensorstore.TensorStore` that has not read the array.

    ValueError is raised if the array is missing, or has another shape, dtype or encoding.
    """
    base = {"driver": "file", "path": f"{directory.absolute()}/"}
    array = tensorstore.open(
        {
            "driver": "zarr",
            "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"},
            "metadata": {"filters": None, "order": "C", "shape": shape},
            "fill_missing_data_reads": False,
        },
        open=True,
        read=True,
        dtype=tensorstore.dtype(dtype),
    ).result()
    stored = array.spec().to_json()["metadata"]
    if (stored["compressor"] or {}).get("id") != "zstd":
        raise ValueError(f"{name} is not compressed by zstd")
    if any(chunk > size for chunk, size in zip(stored["chunks"], shape, strict=True)):
        raise ValueError(f"{name} is stored in chunks of {stored['chunks']}")
    return array


def check(directory: Path, arrays: Mapping[str, tuple[list[int], str]]) -> None:
    """Reads arrays in a child process, unless the same checkpoint was read so before.

    The checksums of the checkpoint must be right. ValueError is raised if an array is not stored as
    it should be, or takes too much memory.
    """
    sums = untrusted.read_file(directory.parent / manifest.NAME)
    if not arrays or bounded.trusted(bounded.key(sums)):
        return
    request = json.dumps([str(directory.absolute()), dict(sorted(arrays.items()))]).encode()
    sizes = [math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in arrays.values()]
    bounded.check(
        __name__, request, bounded.key(sums, directory.name.encode(), request.partition(b",")[2]),
        memory=bounded.MEMORY + 4 * max(sizes),
        seconds=bounded.SECONDS + _SECONDS_PER_GB * sum(sizes) // 10**9,
    )  # fmt: skip


def _try(request: bytes) -> None:
    """Reads every chunk of the arrays that `check` asks for, one after the other."""
    directory, arrays = untrusted.parse_json(request)
    try:
        for name, (shape, dtype) in arrays.items():
            array = open_array(Path(directory), name, shape, dtype)
            size = array.spec().to_json()["metadata"]["chunks"]
            for place in np.ndindex(*(-(-n // c) for n, c in zip(shape, size, strict=True))):
                edges = [
                    (i * c, min((i + 1) * c, n)) for i, c, n in zip(place, size, shape, strict=True)
                ]
                array[tuple(slice(*edge) for edge in edges)].read().result()
    except MemoryError:
        raise
    # Orbax and tensorstore raise errors of many classes for damaged files.
    except Exception as error:
        raise bounded.Refused(str(error)) from error


if __name__ == "__main__":
    bounded.serve(_try)
