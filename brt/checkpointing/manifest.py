"""The files of a checkpoint: their checksums, and the arrays in them.

MANIFEST.sha256 has the checksums of all files, in the format of the command `sha256sum`. They are
needed because the library that stores the arrays notices missing files, but not flipped bits.

Orbax writes each array with Zarr 2: `.zarray` is JSON that describes the array, and each chunk is
a zstd stream. Both are entries of a key-value store (OCDBT), whose tree of keys is compressed, too.
This module fixes the format that brt reads, and no file of a checkpoint can choose another one.
Before brt itself reads arrays, a child process with limited memory and time reads them by running
this module.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes  # noqa: F401  # registers bfloat16 with NumPy
import numpy as np
import tensorstore

from brt import bounded, durable, untrusted

NAME = "MANIFEST.sha256"
# All files of a checkpoint that are not arrays have together at most this many bytes.
_OTHERS = 64 << 20
_SECONDS_PER_GB = 20  # for the child process that first reads arrays
_LINE = re.compile(r"([0-9a-f]{64})  (\S.*)")


def write(directory: Path, known: Mapping[str, str] = MappingProxyType({})) -> None:
    """Writes MANIFEST.sha256 for all files below `directory`, and flushes all files to disk.

    `known` maps the paths of files, relative to `directory`, to their checksums. These files are
    not read, and are listed even if they are on other hosts.
    """
    sums = {**checksums(directory, known), **known}
    lines = (f"{digest}  {name}\n" for name, digest in sorted(sums.items()))
    (directory / NAME).write_text("".join(lines))
    durable.sync_tree(directory)


def checksums(directory: Path, known: Collection[str] = ()) -> dict[str, str]:
    """Returns a dictionary from the relative paths of files below a directory to their checksums.

    Files whose paths are in `known` are left out.
    """
    sums = {}
    for path in files(directory):
        if (name := path.relative_to(directory).as_posix()) not in known:
            with path.open("rb") as file:
                sums[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return sums


def verify(
    directory: Path, only: Collection[str] | None = None, *, arrays: int | None = None
) -> list[str]:
    """Compares a checkpoint with its MANIFEST.sha256; returns a phrase for each problem.

    Only files whose relative paths are in `only` are read (None: all). `arrays` is the number of
    bytes of the checkpoint's arrays (None: not known). If all files together are far larger than
    the arrays, no file is read, and the result has only a phrase about this problem.
    """
    try:
        expected = read(directory)
    except ValueError as error:
        return [str(error)]
    found = sum(map(_size, files(directory)))
    if arrays is not None and found > 2 * arrays + _OTHERS:
        return [f"it has {found:,} bytes for arrays of {arrays:,}"]
    present = {path.relative_to(directory).as_posix(): path for path in files(directory)}
    problems = [f"{name} is missing" for name in expected if name not in present]
    problems += [f"{name} is not in {NAME}" for name in present if name not in expected]
    for name in sorted(expected.keys() & present.keys() & {*(only or present)}):
        problems += _verify_file(present[name], name, expected[name])
    return problems


def read(directory: Path) -> dict[str, str]:
    """Returns the content of MANIFEST.sha256: it maps relative paths of files to hex checksums.

    ValueError is raised if the manifest is missing or damaged; the message says what is wrong.
    """
    try:
        text = untrusted.read_file(directory / NAME).decode("ascii")
    except FileNotFoundError as error:
        raise ValueError(f"{NAME} is missing") from error
    except OSError as error:
        raise ValueError(f"{NAME} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{NAME} is damaged: it is not plain text") from error
    checksums: dict[str, str] = {}
    for number, line in enumerate(filter(None, re.split(r"(?<=\n)", text)), start=1):
        match = _LINE.fullmatch(line.removesuffix("\n"))
        if not match or not line.endswith("\n") or match[2] in checksums:
            raise ValueError(f"{NAME} is damaged: line {number} is not 'sha256  path'")
        checksums[match[2]] = match[1]
    return checksums


def files(directory: Path) -> list[Path]:
    """Returns the paths of all files of a checkpoint except the manifest; links count as files."""
    paths = [
        Path(root) / name
        for root, directories, names in os.walk(directory)
        for name in [*names, *(d for d in directories if (Path(root) / d).is_symlink())]
    ]
    return sorted(path for path in paths if path != directory / NAME)


def _size(path: Path) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:  # A trainer may have removed the file.
        return 0


def _verify_file(path: Path, name: str, expected: str) -> list[str]:
    if path.is_symlink():
        return [f"{name} is a symbolic link"]
    try:
        with untrusted.open_file(path) as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return [f"{name} cannot be read ({error.strerror})"]
    if actual == expected:
        return []
    return [f"{name} is damaged: sha256 {actual[:12]}, expected {expected[:12]}"]


def open_array(directory: Path, name: str, shape: list[int], dtype: str) -> Any:
    """Opens an array that Orbax wrote; returns a `tensorstore.TensorStore`, without reading data.

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


def check_arrays(directory: Path, arrays: Mapping[str, tuple[list[int], str]]) -> None:
    """Lets a child process read arrays, unless brt wrote them or did this before (see `bounded`).

    `arrays` maps the names of the arrays to their shapes and dtypes. The checksums of the files
    must have been verified before. ValueError is raised if an array has another shape, dtype or
    encoding, or if reading takes too much memory or time.
    """
    sums = untrusted.read_file(directory.parent / NAME)
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
    """Reads every chunk of the arrays that `check_arrays` asks for, one after the other."""
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
