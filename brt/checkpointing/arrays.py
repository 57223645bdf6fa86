"""Reads the arrays of a checkpoint, so that a forged file cannot exhaust the memory.

Orbax writes each array with Zarr 2: `.zarray` is JSON that describes the array, and each chunk is
a zstd stream. Both are entries of a key-value store (OCDBT). Somebody who can write a checkpoint
can forge these files together with their checksums. Therefore shapes, dtypes and unpacked sizes in
the files are compared with meta.json before any memory is allocated.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from brt import untrusted

# `unpacked_bytes` returns a coarse upper bound. A chunk is accepted if this bound is at most RATIO
# times the bytes of the array elements in the chunk, plus _SLACK bytes.
RATIO = 64
_SLACK = 1 << 20
_BLOCK = 1 << 17  # One block of a zstd stream unpacks to at most this many bytes.
_MAGIC = b"\x28\xb5\x2f\xfd"
_ZARRAY = {
    "zarr_format": Literal[2], "shape": [int], "chunks": [int], "dtype": str,
    "compressor": {"id": Literal["zstd"]}, "filters": type(None),
}  # fmt: skip


def read(path: Path, stored: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Reads arrays of a checkpoint, after `check` has accepted the files in which they are stored.

    Args:
      path: the directory of a checkpoint that orbax wrote, `state` or `frozen`.
      stored: the shape, dtype and sharding of every array to read, by the array's name. Arrays
        without elements are not allowed, because orbax does not store them.

    Returns:
      The arrays, by name.

    Raises:
      ValueError: an array is missing, or `check` does not accept its files.
    """
    check(path, stored)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        arrays = checkpointer.restore(
            path.absolute(),
            args=ocp.args.PyTreeRestore(
                item=stored,
                restore_args=ocp.checkpoint_utils.construct_restore_args(stored),
                partial_restore=True,
            ),
        )
    for name, leaf in stored.items():
        # If the checkpoint has no array of this name, Orbax raises no error and returns the leaf of
        # `stored`, which is only a description.
        array = arrays[name]
        if not isinstance(array, jax.Array) or (array.shape, array.dtype) != (
            leaf.shape, leaf.dtype,
        ):  # fmt: skip
            raise ValueError(f"{name} is no array of {leaf.dtype}{list(leaf.shape)} there")
    return {name: arrays[name] for name in stored}


def check(directory: Path, leaves: Mapping[str, Any]) -> None:
    """Checks that arrays are stored with the shapes and dtypes that meta.json says, and in the
    encoding that brt uses, without unpacking the arrays.

    Args:
      directory: the directory `state` or `frozen` of a checkpoint.
      leaves: for each array by name, an object with the `shape` and `dtype` from meta.json.

    Raises:
      ValueError: an array is stored with another shape, dtype or encoding, or a chunk would unpack
        to far more bytes than it should hold.
    """
    base = {"driver": "file", "path": f"{directory.absolute()}/"}
    check_store(tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result(), leaves)


def check_store(store: tensorstore.KvStore, leaves: Mapping[str, Any]) -> None:
    """Checks the arrays in an open key-value store as `check` does.

    Args:
      store: the key-value store to which orbax wrote the arrays.
      leaves: for each array by name, an object with the `shape` and `dtype` from meta.json.

    Raises:
      ValueError: an array is stored with another shape, dtype or encoding, or a chunk would unpack
        to far more bytes than it should hold.
    """
    chunks: dict[str, list[bytes]] = defaultdict(list)
    for key in store.list().result():
        chunks[key.decode("utf-8", "replace").rpartition("/")[0]].append(key)
    for name, leaf in leaves.items():
        described = untrusted.checked_json(store.read(f"{name}/.zarray").result().value, _ZARRAY)
        shape, dtype = list(leaf.shape), np.dtype(leaf.dtype)
        size = described["chunks"]
        if described["shape"] != shape or described["dtype"] not in (dtype.name, dtype.str):
            raise ValueError(f"{name} is stored as {described['dtype']}{described['shape']}")
        if len(size) != len(shape) or not all(0 < c <= n for c, n in zip(size, shape, strict=True)):
            raise ValueError(f"{name} is stored in chunks of {size}")
        keys = [key for key in chunks[name] if not key.endswith(b"/.zarray")]
        if len(keys) != math.prod(-(-n // c) for n, c in zip(shape, size, strict=True)):
            raise ValueError(f"{name} is stored in {len(keys)} chunks of {size}")
        most = RATIO * math.prod(size) * dtype.itemsize + _SLACK
        for key in keys:
            if (claimed := unpacked_bytes(store.read(key).result().value)) > most:
                raise ValueError(f"a chunk of {name} may unpack to {claimed:,} bytes")


def unpacked_bytes(stream: bytes) -> int:
    """Returns an upper bound on the number of bytes to which a zstd stream unpacks (RFC 8878,
    section 3.1.1).

    The stream must have a single frame. The bound is computed from the headers of the frame's
    blocks, and nothing is unpacked.

    Raises:
      ValueError: the bytes are not a zstd stream of one frame.
    """
    if stream[:4] != _MAGIC or len(stream) < 6:
        raise ValueError("a chunk is no stream of zstd")
    single, dictionary = stream[4] >> 5 & 1, stream[4] & 3
    content = (1 << (stream[4] >> 6)) & (15 if single else 14)
    place, total, last = 5 + (not single) + content + (0, 1, 2, 4)[dictionary], 0, False
    while not last:
        header = int.from_bytes(stream[place : place + 3], "little")
        last, kind, size = bool(header & 1), header >> 1 & 3, header >> 3
        total += _BLOCK if kind == 2 else size
        place += 3 + (1 if kind == 1 else size)
        if place > len(stream):
            raise ValueError("a chunk's stream ends too early")
    # A checksum of 4 bytes may follow the last block of the frame. Further bytes would be a second
    # frame.
    if len(stream) > place + 4:
        raise ValueError("a chunk has more than one stream")
    return total
