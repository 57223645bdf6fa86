"""The rows of a split on disk.

A store is a directory:

    *.bin           rows of different lengths that may not fit into memory, one after another
    rows.npz        everything else: arrays, offsets of the rows in *.bin, lists as JSON in UTF-8
    manifest.json   sources, settings, left out rows, counts and hashes; written last
"""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from brt import untrusted
from brt.data import manifests, sources, verified
from brt.data.rows import ragged
from brt.data.rows.ragged import Ragged


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RowStore:
    """Base class of stores of rows.

    Attributes:
      directory: the directory of the store.
      manifest: counts, settings and hashes.
      ids: the name of each row in predictions.
    """

    directory: Path
    manifest: Mapping[str, Any]
    ids: tuple[str, ...]

    def __len__(self) -> int:
        """Returns the number of rows."""
        return len(self.ids)

    @property
    def written_with(self) -> str:
        """Fingerprint of the tokenizer or vocabulary that encoded the rows; "" if it is
        not known.
        """
        return ""

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything in the store that a model reads or learns."""
        return self.manifest["fingerprint"]


class Files(NamedTuple):
    """The content of a store's directory while it is opened.

    Attributes:
      directory: the directory.
      manifest: counts, settings and hashes.
      npz: the name of the file that contains the columns.
      columns: arrays, and tuples for lists.
    """

    directory: Path
    manifest: Mapping[str, Any]
    npz: str
    columns: Mapping[str, Any]

    def ragged(self, name: str, offsets: str = "") -> Ragged:
        """Returns the rows whose values are one column and whose offsets are another.

        Args:
          name: the name of the column of values.
          offsets: the name of the column of offsets; "" stands for `name` followed by "_offsets".
        """
        return ragged.checked(self.columns[name], self.columns[offsets or f"{name}_offsets"])

    def on_disk(self, file: str, dtype: np.dtype, offsets: np.ndarray, count: str) -> Ragged:
        """Returns the rows of a file of values.

        Args:
          file: the name of the file.
          dtype: the dtype of its values.
          offsets: int64 [rows + 1], the index of each row's first value.
          count: the entry of the manifest that contains the number of rows.

        Raises:
          ValueError: the number of rows differs from that of the manifest.
        """
        rows = ragged.read(self.directory / file, dtype, offsets)
        self.check(count, rows)
        return rows

    def check(self, count: str, *columns: Any) -> None:
        """Raises ValueError if a column does not have as many rows as the manifest says.

        Args:
          count: the entry of the manifest that contains the number of rows.
          columns: the columns.
        """
        if {self.manifest[count]} != {*map(len, columns)}:
            raise ValueError(f"{self.npz} has another length than its manifest says")


@contextlib.contextmanager
def opened(
    directory: Path | str,
    lists: Sequence[str] | None = None,
    *,
    facts: Mapping[str, Any] = {},
    npz: str = "rows.npz",
    what: str = "store",
) -> Iterator[Files]:
    """Context that opens a store which `finish` completed, and yields its content.

    Args:
      directory: the directory of the store.
      lists: names of the columns that are lists; None takes them from the manifest.
      facts: types of further entries of the manifest; see `untrusted.check`.
      npz: the name of the file that contains the columns.
      what: what the directory is, for error messages.

    Raises:
      DataError: the store is missing, incomplete or has another format, or an error in the body of
        the context shows that it is damaged.
    """
    directory = Path(directory)
    kind = {"fingerprint": str, "sha256": {str: str}, **({} if lists else {"texts": [str]})}
    manifest = manifests.read(directory / "manifest.json", {**kind, **facts})
    with manifests.explaining_damage(directory, what):
        with untrusted.npz(directory / npz) as arrays:
            columns: dict[str, Any] = {name: array.read() for name, array in arrays.items()}
        for name, column in columns.items():
            if column.dtype.kind not in "biuf" or not column.ndim or not np.isfinite(column).all():
                raise ValueError(f"{name} is no column of finite numbers")
        for name in lists or manifest["texts"]:
            columns[name] = _list(name, columns[name])
        yield Files(directory, manifest, npz, columns)
        verified.check(directory, manifest["sha256"])


def verify(directory: Path) -> None:
    """Compares all files of a store with their hashes, even if they were compared before.

    Raises:
      DataError: the store is missing, incomplete or has another format, or a file differs.
    """
    manifest = manifests.read(directory / "manifest.json", {"sha256": {str: str}})
    with manifests.explaining_damage(directory, "store"):
        verified.check(directory, manifest["sha256"], whole=True)


def _list(name: str, column: np.ndarray) -> tuple[Any, ...]:
    items = untrusted.parse_json(column.tobytes().decode("utf-8"))
    for item in items if isinstance(items, list) else [items]:
        untrusted.check(item, [str] if isinstance(item, list) else str, f"a part of {name}")
    untrusted.check(items, list, name)
    return tuple(items)


def within(name: str, places: np.ndarray, counts: int | np.ndarray) -> None:
    """Raises ValueError unless all integers in `places` are at least 0 and below the counts.

    Args:
      name: the name of the column, for the error message.
      places: the array to check.
      counts: the number of things that the indices point to; an array must have a compatible shape.
    """
    if places.dtype.kind != "i" or ((places < 0) | (places >= counts)).any():
        raise ValueError(f"{name} points where nothing is")


def finish(
    directory: Path,
    columns: Mapping[str, np.ndarray | Sequence[Any]],
    facts: Mapping[str, Any],
    *,
    files: Sequence[str] = (),
    identity: bytes = b"",
    npz: str = "rows.npz",
) -> None:
    """Completes a store: writes its columns, and then the manifest with the hashes of all files.

    Args:
      directory: the directory of the store.
      columns: arrays, and lists that can be written as JSON.
      facts: further entries of the manifest.
      files: existing files whose content is part of the fingerprint.
      identity: further bytes of the fingerprint; b"" takes the content of all columns.
      npz: the name of the file that contains the columns.
    """
    arrays = {
        name: column if isinstance(column, np.ndarray)
        else np.frombuffer(json.dumps(list(column)).encode(), np.uint8)
        for name, column in columns.items()
    }  # fmt: skip
    np.savez(directory / npz, **arrays)
    hashes = {path.name: sources.sha256(path) for path in sorted(directory.iterdir())}
    named = "".join(hashes[name] for name in files).encode()
    fingerprint = hashlib.sha256(named + (identity or _content(arrays))).hexdigest()
    manifest = {"fingerprint": fingerprint, **facts, "sha256": hashes}
    manifests.write(directory / "manifest.json", manifest)


def _content(arrays: Mapping[str, np.ndarray]) -> bytes:
    return b"".join(
        json.dumps([name, array.dtype.str, array.shape]).encode()
        + np.ascontiguousarray(array).tobytes()
        for name, array in sorted(arrays.items())
    )
