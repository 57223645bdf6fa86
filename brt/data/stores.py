"""Stores: the prepared data of a split on disk, and arrays in files.

A store of rows is a directory:

    *.bin           rows of different lengths that may not fit into memory, one after another
    rows.npz        the columns: arrays with an element for each row, offsets of the rows in *.bin,
                    and lists of texts, which are JSON in UTF-8
    manifest.json   sources, settings, rows that were left out, counts and hashes; written last

Files are not memory-mapped. If a memory-mapped file is truncated, reading a missing page kills the
process. An ordinary read of a truncated file returns too few bytes, which can be reported as an
error.

When a store is opened, its files are compared with their hashes. If the hash of a file is right, a
seal (an empty file) is created in the cache. As long as the seal is found, the file is not read
again. The name of the seal is a hash of the file's expected hash, size, times and inode. After any
change of the file, the seal would have another name, so no seal is found and the file is read
again.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from brt import storage, untrusted, user_cache
from brt.data import manifests, sources
from brt.errors import DataError

COLUMNS = "rows.npz"  # The file of this name contains the columns of a store.


class OnDisk:
    """A one-dimensional array of `size` little-endian values in a file.

    A slice, or an array of indices, int64 [..., K], selects values as in a NumPy array. The values
    are copied from the file, which is read once for each row of K indices.
    """

    def __init__(self, path: Path, dtype: np.dtype, size: int, offsets: np.ndarray | None = None):
        """If the values are rows that are read one at a time, `offsets` is `Ragged.offsets`."""
        self.dtype, self.size = np.dtype(dtype), size
        self._path, width = path, self.dtype.itemsize
        bounds = None if offsets is None else offsets * width
        self._remote = storage.of(path).remote(path, size * width, bounds)
        if self._remote:
            return
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, places: slice | np.ndarray) -> np.ndarray:
        if isinstance(places, slice):
            start, stop, step = places.indices(self.size)
            if step != 1:
                raise ValueError(f"numbers of a file are read one after another, not by {step}")
            values = np.empty(max(stop - start, 0), self.dtype)
            self._read(values, start)
            return values
        # For each row of K indices, all values between the smallest and the largest index are read,
        # so the indices of a row should be close to each other.
        rows = places.reshape(-1, places.shape[-1])
        first = rows.min(axis=1)
        widths = rows.max(axis=1) - first + 1
        values = np.zeros((len(rows), widths.max(initial=0)), self.dtype)
        if self._remote:
            ranges = (np.stack([first, widths], axis=1) * self.dtype.itemsize).tolist()
            self._remote.expect(map(tuple, ranges))
        for row, start, width in zip(values, first.tolist(), widths.tolist(), strict=True):
            self._read(row[:width], start)
        return np.take_along_axis(values, rows - first[:, None], axis=1).reshape(places.shape)

    def _read(self, into: np.ndarray, start: int) -> None:
        unread, at = memoryview(into).cast("B"), start * self.dtype.itemsize
        while unread:
            try:
                if self._remote:
                    unread[:] = self._remote.read(at, len(unread))
                    return
                count = os.preadv(self._file, [unread], at)
            except OSError as error:
                raise DataError(f"{self._path} cannot be read: {error.strerror}") from error
            if not count:
                store = manifests.corpus_directory(self._path.parent)
                raise DataError(
                    f"{self._path} was cut while it was being read: it ends before byte {at:,} of "
                    f"{self.size * self.dtype.itemsize:,}; delete {store} and prepare it again"
                )
            unread, at = unread[count:], at + count


@dataclasses.dataclass(frozen=True, eq=False)
class Ragged:
    """Rows of different lengths; row i is values[offsets[i]:offsets[i + 1]]."""

    values: np.ndarray | OnDisk  # [elements, ...], the elements of all rows, one after another
    # int64 [rows + 1]: the index of each row's first element, followed by the number of elements
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int | np.integer) -> np.ndarray:
        """Returns a row: a view if the values are in memory, a copy if they are on disk."""
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """Length of each row, int64 [rows]."""
        return np.diff(self.offsets)

    @classmethod
    def checked(cls, values: np.ndarray | OnDisk, offsets: np.ndarray) -> "Ragged":
        """Returns the rows; raises ValueError unless the offsets ascend from 0 to len(values)."""
        if (
            offsets.dtype != np.int64 or offsets.ndim != 1 or not len(offsets) or offsets[0] != 0
            or offsets[-1] != len(values) or (offsets[1:] < offsets[:-1]).any()
        ):  # fmt: skip
            raise ValueError(f"rows do not fill {len(values):,} values")
        return cls(values, offsets)

    @classmethod
    def from_rows(cls, rows: Sequence[np.ndarray]) -> "Ragged":
        """Returns a ragged int32 array of `rows`, arrays [length of the row, ...].

        All axes but the first have the same lengths in all rows.
        """
        empty = np.zeros((0, *rows[0].shape[1:]) if rows else 0, np.int32)
        values = np.concatenate([empty, *rows]).astype(np.int32)
        return cls(values, row_offsets([len(row) for row in rows]))


def row_offsets(lengths: Sequence[int]) -> np.ndarray:
    """Returns int64 [rows + 1]: where each row begins, followed by the sum of all lengths."""
    return np.r_[0, np.cumsum(np.array(lengths, np.int64))].astype(np.int64)


class RaggedWriter:
    """Writes the rows of a ragged array to a file, which contains nothing but the values."""

    def __init__(self, path: Path, dtype: np.dtype):
        self._file, self._dtype = open(path, "wb"), dtype
        self._lengths: list[int] = []

    def extend(self, rows: Iterable[np.ndarray]) -> None:
        """Appends rows, arrays [length of the row, ...], to the file."""
        for row in rows:
            self._file.write(np.ascontiguousarray(row, self._dtype).data)
            self._lengths.append(len(row))

    def __enter__(self) -> "RaggedWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def offsets(self) -> np.ndarray:
        """Offsets of the rows that were written so far, int64 [rows + 1]."""
        return row_offsets(self._lengths)


# A seal (a record that a file's hash was right) is only created this many seconds after the last
# change of the file, so that another change surely gives the file another time stamp.
SETTLED = 1.0


def check_hashes(directory: Path, hashes: Mapping[str, str], *, whole: bool = False) -> None:
    """Raises ValueError if a file of a directory has another SHA-256 than `hashes` says.

    With `whole`, all files are read, even those in a bucket and those that are known to be
    unchanged.
    """
    for name, expected in hashes.items():
        path = directory / name
        if whole:
            storage.of(path).need(path)
        elif storage.of(path).remote(path, 0):
            continue
        stat = path.stat()
        state = (expected, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
        key = hashlib.sha256(repr(state).encode()).hexdigest()
        if not whole and user_cache.sealed("verified", key):
            continue
        actual = sources.sha256(path)
        if actual != expected:
            user_cache.seal("verified", key, good=False)
            raise ValueError(f"{name} has the sha256 {actual[:12]}, not {expected[:12]}")
        if time.time() - stat.st_ctime > SETTLED:
            user_cache.seal("verified", key)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Store:
    """Base class of opened stores; a subclass adds the columns of its kind of data."""

    directory: Path
    manifest: Mapping[str, Any]  # content of manifest.json: counts, settings and hashes

    @property
    def written_with(self) -> str:
        """Hash of the tokenizer or vocabulary that encoded the data; "" if it is not known."""
        return self.manifest.get("tokenizer", {}).get("fingerprint", "")

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything in the store that a model reads or learns."""
        return self.manifest["fingerprint"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RowStore(Store):
    """Base class of stores of rows."""

    ids: tuple[str, ...]  # the id of each row, by which files of predictions name the row

    def __len__(self) -> int:
        return len(self.ids)


class Files(NamedTuple):
    """The content of a store's directory, from which an instance of `Store` is made."""

    directory: Path
    manifest: Mapping[str, Any]
    columns: Mapping[str, Any]  # by name: arrays, and tuples of texts (or of lists of texts)

    def ragged(self, name: str) -> Ragged:
        """Returns rows of different lengths, whose values and offsets are columns of the store."""
        return Ragged.checked(self.columns[name], self.columns[f"{name}_offsets"])

    def on_disk(self, file: str, dtype: np.dtype, offsets: np.ndarray, count: str) -> Ragged:
        """Returns rows of different lengths, whose values a `RaggedWriter` has written to a file.

        A row is read when it is indexed. `offsets` is int64 [rows + 1]: the index of each row's
        first value, followed by the number of values. `count` is as in `check`.
        """
        path = self.directory / file
        last = int(offsets.flat[-1]) if offsets.size else 0
        remote = storage.of(path).remote(path, last * dtype.itemsize)
        size, rest = (last, 0) if remote else divmod(path.stat().st_size, dtype.itemsize)
        if rest or (offsets.size and size != int(offsets.flat[-1])):
            raise ValueError(f"{path.name} has another size than its rows")
        rows = Ragged.checked(OnDisk(path, dtype, size, offsets), offsets)
        self.check(count, rows)
        return rows

    def check(self, count: str, *columns: Any) -> None:
        """Raises ValueError if columns are not as long as the manifest's entry `count` says."""
        if {self.manifest[count]} != {*map(len, columns)}:
            raise ValueError(f"{COLUMNS} has another length than its manifest says")


@contextlib.contextmanager
def opened(
    directory: Path | str,
    *,
    facts: Mapping[str, Any] = {},
    what: str = "store",
    verify: bool = True,
) -> Iterator[Files]:
    """Context that opens a store which `finish` completed, and yields the store's content.

    Args:
      facts: types of further entries that the manifest must have, in the notation of
        `untrusted.check`.
      what: the noun for the directory in error messages.
      verify: False does not compare the files with their hashes, because the caller has just
        written them.

    Raises:
      DataError: the store is missing, incomplete, damaged or has another format. An OSError,
        ValueError or KeyError in the body of the `with` statement counts as damage, and is
        converted to a DataError.
    """
    directory = Path(directory)
    kind = {"fingerprint": str, "sha256": {str: str}, "texts": [str], **facts}
    manifest = manifests.read(directory / "manifest.json", kind)
    with manifests.explaining_damage(directory, what):
        storage.of(directory).need(directory / COLUMNS)
        with untrusted.npz(directory / COLUMNS) as arrays:
            columns: dict[str, Any] = {name: array.read() for name, array in arrays.items()}
        for name, column in columns.items():
            if column.dtype.kind not in "biuf" or not column.ndim or not np.isfinite(column).all():
                raise ValueError(f"{name} is no column of finite numbers")
        for name in manifest["texts"]:
            columns[name] = _list(name, columns[name])
        yield Files(directory, manifest, columns)
        if verify:
            check_hashes(directory, manifest["sha256"])


def verify(directory: Path) -> None:
    """Compares all files of a store with their hashes, even if they were compared before."""
    manifest = manifests.read(directory / "manifest.json", {"sha256": {str: str}})
    with manifests.explaining_damage(directory, "store"):
        check_hashes(directory, manifest["sha256"], whole=True)


def _list(name: str, column: np.ndarray) -> tuple[Any, ...]:
    items = untrusted.parse_json(column.tobytes().decode("utf-8"))
    whole = isinstance(items, list)
    if whole and {*map(type, items)} <= {str}:  # This is fast for millions of texts.
        return tuple(items)
    for item in items if whole else [items]:
        untrusted.check(item, [str] if isinstance(item, list) else str, f"a part of {name}")
    untrusted.check(items, list, name)
    return tuple(items)


def check_indices(name: str, places: np.ndarray, counts: int | np.ndarray) -> None:
    """Raises ValueError unless all integers in `places` are at least 0 and below `counts`.

    `counts` is a length, or lengths in a shape that can be broadcast to the shape of `places`.
    """
    if places.dtype.kind != "i" or ((places < 0) | (places >= counts)).any():
        raise ValueError(f"{name} points where nothing is")


def finish(
    directory: Path,
    columns: Mapping[str, np.ndarray | Ragged | Sequence[Any]],
    facts: Mapping[str, Any],
    *,
    files: Sequence[str] = (),
    identity: bytes = b"",
) -> None:
    """Completes a store: writes the columns, and then the manifest with the hashes of all files.

    Args:
      columns: arrays, ragged arrays, and lists that can be written as JSON, by name.
      facts: further entries of the manifest, such as counts and settings.
      files: names of existing files whose content is a part of the fingerprint, the hash of
        everything that a model reads or learns.
      identity: bytes that are a part of the fingerprint; b"" uses the content of all columns
        instead.
    """
    arrays: dict[str, np.ndarray] = {}
    texts = []
    for name, column in columns.items():
        if isinstance(column, Ragged):
            arrays |= {name: column.values[:], f"{name}_offsets": column.offsets}
        elif isinstance(column, np.ndarray):
            arrays[name] = column
        else:
            arrays[name] = np.frombuffer(json.dumps(list(column)).encode(), np.uint8)
            texts.append(name)
    np.savez(directory / COLUMNS, **arrays)
    hashes = {path.name: sources.sha256(path) for path in sorted(directory.iterdir())}
    named = "".join(hashes[name] for name in files).encode()
    fingerprint = hashlib.sha256(named + (identity or _content(arrays))).hexdigest()
    manifest = {"fingerprint": fingerprint, "texts": texts, **facts, "sha256": hashes}
    manifests.write(directory / "manifest.json", manifest)


def _content(arrays: Mapping[str, np.ndarray]) -> bytes:
    return b"".join(
        json.dumps([name, array.dtype.str, array.shape]).encode()
        + np.ascontiguousarray(array).tobytes()
        for name, array in sorted(arrays.items())
    )
