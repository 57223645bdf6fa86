"""Writes the arrays of a run whose processes see no common directory: each writes its own shards.

The format is the one that Orbax writes if all processes see one directory. Each process has a
key-value store (OCDBT) in a directory of its own. One more store, in the directory above these
directories, refers to the content of the processes' stores.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import tensorstore

# The files of a store have at most this size, because a file is uploaded as a whole. A chunk of an
# array is never divided among files, so chunks must not be larger, either.
FILE_BYTES = 64 << 20


class Part(NamedTuple):
    """The shards of one array that this process writes."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    chunk: tuple[int, ...]  # the shape of the chunks of the array; see `chunk_shape`
    shards: list[tuple[tuple[slice, ...], np.ndarray]]  # (place in the array, values) of each


def copied(arrays: Mapping[str, jax.Array]) -> list[Part]:
    """Copies this process's shards to the host, so that a step may donate `arrays` afterwards."""
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
    """Returns the shape of the chunks into which a shard of the shape `shape` is divided.

    Chunks are equal parts of at most FILE_BYTES bytes. As long as a chunk is too large, its longest
    axis is divided by the smallest prime factor of the axis's size.
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
    """Merges the stores of all processes into a new store, which only refers to their content.

    `parts` are the names of the stores' directories. `base` is TensorStore's spec of the directory
    that contains them. The new store is written to this directory, too. Returns a dictionary from
    the names of the new store's files to the contents of the files.
    """

    # All stores are opened in one context, so that one can refer to the content of the others.
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
