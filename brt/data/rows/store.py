"""Stores: the rows of a split on disk.

A store is a directory:

    *.bin           rows of different lengths that may not fit into memory, one after another
    rows.npz        the columns: arrays with an element for each row, offsets of the rows in *.bin,
                    and lists of texts, which are JSON in UTF-8
    manifest.json   sources, settings, rows that were left out, counts and hashes; written last
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
    """Base class of opened stores; a subclass adds the columns of its kind of rows."""

    directory: Path
    manifest: Mapping[str, Any]  # content of manifest.json: counts, settings and hashes
    ids: tuple[str, ...]  # the id of each row, by which files of predictions name the row

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def written_with(self) -> str:
        """Hash of the tokenizer or vocabulary that encoded the rows; "" if it is not known."""
        return ""

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything in the store that a model reads or learns."""
        return self.manifest["fingerprint"]


class Files(NamedTuple):
    """The content of a store's directory, from which a subclass of RowStore is made."""

    directory: Path
    manifest: Mapping[str, Any]
    npz: str  # the name of the file that contains the columns
    columns: Mapping[str, Any]  # by name: arrays, and tuples of texts (or of lists of texts)

    def ragged(self, name: str, offsets: str = "") -> Ragged:
        """Returns rows of different lengths, whose values and offsets are columns of the store.

        The default of `offsets` is `name` followed by "_offsets".
        """
        return ragged.checked(self.columns[name], self.columns[offsets or f"{name}_offsets"])

    def on_disk(self, file: str, dtype: np.dtype, offsets: np.ndarray, count: str) -> Ragged:
        """Returns rows of different lengths, whose values are in a file of their own.

        `offsets` is int64 [rows + 1], the index of each row's first value, and the number of
        values.
        """
        rows = ragged.read(self.directory / file, dtype, offsets)
        self.check(count, rows)
        return rows

    def check(self, count: str, *columns: Any) -> None:
        """Raises ValueError if columns are not as long as the manifest's entry `count` says."""
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
    verify: bool = True,
) -> Iterator[Files]:
    """Context that opens a store which `finish` completed, and yields the store's content.

    Args:
      lists: names of the columns that are JSON lists of texts; None takes the names from the
        manifest.
      facts: types of further entries that the manifest must have, in the notation of
        `untrusted.check`.
      what: the noun for the directory in error messages.
      verify: False does not compare the files with their hashes, because the caller has just
        written them.

    Raises:
      DataError: the store is missing, incomplete or has another format; or the body of the `with`
        statement raises an error that shows that the store is damaged (OSError, ValueError or
        KeyError, for example), which is then converted to a DataError.
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
        if verify:
            verified.check(directory, manifest["sha256"])


def verify(directory: Path) -> None:
    """Compares all files of a store with their hashes, even if they were compared before."""
    manifest = manifests.read(directory / "manifest.json", {"sha256": {str: str}})
    with manifests.explaining_damage(directory, "store"):
        verified.check(directory, manifest["sha256"], whole=True)


def _list(name: str, column: np.ndarray) -> tuple[Any, ...]:
    items = untrusted.parse_json(column.tobytes().decode("utf-8"))
    for item in items if isinstance(items, list) else [items]:
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
    columns: Mapping[str, np.ndarray | Sequence[Any]],
    facts: Mapping[str, Any],
    *,
    files: Sequence[str] = (),
    identity: bytes = b"",
    npz: str = "rows.npz",
) -> None:
    """Completes a store: writes the columns, and then the manifest with the hashes of all files.

    Args:
      columns: arrays, and lists that can be written as JSON, by name.
      facts: further entries of the manifest, such as counts and settings.
      files: names of existing files whose content is a part of the fingerprint, the hash of
        everything that a model reads or learns.
      identity: bytes that are a part of the fingerprint; b"" uses the content of all columns.
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
