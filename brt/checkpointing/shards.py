"""The arrays of a run whose processes see no common directory: every process writes what it has.

The format is that of Orbax, which writes it where all processes see one directory: a key-value
store (OCDBT) in a directory of each process, and one above them that refers to their content.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import tensorstore

# The files of a store have at most this size, because each is uploaded at once. A chunk of an array
# is in one file, and is therefore not larger, either.
FILE_BYTES = 64 << 20


class Part(NamedTuple):
    """What this process writes of an array."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    chunk: tuple[int, ...]  # the shape of a shard, or of an equal part of it
    shards: list[tuple[tuple[slice, ...], np.ndarray]]  # places in the array, and values


def copied(arrays: Mapping[str, jax.Array]) -> list[Part]:
    """Copies the shards of this process to the host, so that a step may reuse their memory."""
    for array in arrays.values():
        array.copy_to_host_async()
    return [
        Part(
            name, array.shape, np.dtype(array.dtype),
            chunk_shape(array.sharding.shard_shape(array.shape), array.dtype.itemsize),
            [(s.index, np.array(s.data)) for s in array.addressable_shards if not s.replica_id],
        )
        for name, array in arrays.items()
    ]  # fmt: skip


def chunk_shape(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Returns the shape of the equal parts, of at most FILE_BYTES, that a shard is cut into.

    The longest axis is divided first, each time by its smallest factor.
    """
    chunk = list(shape)
    while math.prod(chunk) * itemsize > FILE_BYTES:
        axis = chunk.index(max(chunk))
        divisors = (n for n in range(2, math.isqrt(chunk[axis]) + 1) if not chunk[axis] % n)
        chunk[axis] //= next(divisors, chunk[axis])
    return tuple(chunk)


def directory_of(index: int, name: str) -> str:
    return f"ocdbt.process_{index}_{name}"


def write(directory: Path, parts: Sequence[Part]) -> None:
    """Writes the shards of this process to a new store in a directory."""
    directory.mkdir(parents=True)
    kvstore = {
        "driver": "ocdbt", "base": {"driver": "file", "path": f"{directory.absolute()}/"},
        "target_data_file_size": FILE_BYTES,
    }  # fmt: skip
    codec = tensorstore.CodecSpec({"driver": "zarr", "compressor": {"id": "zstd", "level": 1}})
    # With a context in common, all arrays are opened and written at once.
    context, transaction = tensorstore.Context(), tensorstore.Transaction()
    opened = [
        tensorstore.open(
            {"driver": "zarr", "kvstore": {**kvstore, "path": f"{part.name}/"}},
            create=True, open=True, shape=part.shape, dtype=tensorstore.dtype(part.dtype.name),
            chunk_layout=tensorstore.ChunkLayout(chunk_shape=part.chunk), codec=codec,
            context=context, transaction=transaction,
        )
        for part in parts
    ]  # fmt: skip
    written = [
        array.result()[index].write(values)
        for array, part in zip(opened, parts, strict=True)
        for index, values in part.shards
    ]
    for write_of_shard in written:
        write_of_shard.copy.result()
    transaction.commit_async().result()


def merge(base: Mapping[str, Any], parts: Sequence[str]) -> dict[str, bytes]:
    """Merges the stores `parts` of all processes into one, which only refers to their content.

    `base` is TensorStore's spec of the directory in which the `parts` are, and to which the new
    store is written. Returns the content of its files, by their names.
    """

    # Stores of one context can refer to each other's content.
    context = tensorstore.Context()

    def opened(path: str) -> tensorstore.KvStore:
        spec = {"driver": "ocdbt", "base": {**base, "path": f"{base['path']}{path}"}}
        return tensorstore.KvStore.open(spec, context=context).result()

    transaction = tensorstore.Transaction(atomic=True)
    target = opened("").with_transaction(transaction)
    children = [opened(f"{part}/") for part in parts]
    for copy in [child.experimental_copy_range_to(target) for child in children]:
        copy.result()
    transaction.commit_async().result()
    files = tensorstore.KvStore.open(dict(base)).result()
    names = [name for name in files.list().result() if not name.startswith(b"ocdbt.process_")]
    if b"manifest.ocdbt" not in names:
        raise ValueError(f"the files below {base['path']} cannot be listed")
    return {name.decode(): files.read(name).result().value for name in names}
