"""The rows of a split on disk.

A store is a directory:

    *.bin           rows of different lengths, one after another, where memory would not hold them
    rows.npz        all else: arrays, where the rows of those files begin, lists as JSON in UTF-8
    manifest.json   written last: what the store was made of, what was left out, counts, hashes
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
    """What stores of all kinds have.

    Attributes:
      ids: what predictions call the rows.
    """

    directory: Path
    manifest: Mapping[str, Any]
    ids: tuple[str, ...]

    def __len__(self) -> int:
        """How many rows."""
        return len(self.ids)

    @property
    def written_with(self) -> str:
        """The fingerprint of what encoded the rows; "" where the manifest does not say."""
        return ""

    @property
    def fingerprint(self) -> str:
        """sha256 of what a model reads and learns of the rows."""
        return self.manifest["fingerprint"]


class Files(NamedTuple):
    """What a directory holds.

    Attributes:
      npz: the name of the file of columns.
      columns: arrays; tuples for lists.
    """

    directory: Path
    manifest: Mapping[str, Any]
    npz: str
    columns: Mapping[str, Any]

    def ragged(self, name: str, offsets: str = "") -> Ragged:
        """Rows whose values and offsets are two arrays."""
        return ragged.checked(self.columns[name], self.columns[offsets or f"{name}_offsets"])

    def on_disk(self, file: str, dtype: np.dtype, offsets: np.ndarray, count: str) -> Ragged:
        """The rows of a file; raises ValueError for more or fewer than the manifest counts."""
        rows = ragged.read(self.directory / file, dtype, offsets)
        self.check(count, rows)
        return rows

    def check(self, count: str, *columns: Any) -> None:
        """Raises ValueError for columns with more or fewer rows than the manifest counts."""
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
    """Opens what `finish` completed.

    Args:
      lists: columns that are no arrays; None: those that the manifest says.
      facts: kinds of what the manifest has to say; see `untrusted.check`.
      npz: the name of the file of columns.
      what: the directory is, as messages call it.

    Raises:
      DataError: it is missing, unfinished, of another format, or what is read of it in this
        context shows that it is damaged.
    """
    directory = Path(directory)
    kind = {"fingerprint": str, "sha256": {str: str}, **({} if lists else {"texts": [str]})}
    manifest = manifests.read(directory / "manifest.json", {**kind, **facts})
    with manifests.undamaged(directory, what):
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
    """Reads all files of a store and compares them with their hashes, whenever that was done last.

    Raises:
      DataError: it is missing, unfinished, of another format, or one differs.
    """
    manifest = manifests.read(directory / "manifest.json", {"sha256": {str: str}})
    with manifests.undamaged(directory, "store"):
        verified.check(directory, manifest["sha256"], whole=True)


def _list(name: str, column: np.ndarray) -> tuple[Any, ...]:
    found = untrusted.parse_json(column.tobytes().decode("utf-8"))
    for item in found if isinstance(found, list) else [found]:
        untrusted.check(item, [str] if isinstance(item, list) else str, f"a part of {name}")
    untrusted.check(found, list, name)
    return tuple(found)


def within(name: str, places: np.ndarray, counts: int | np.ndarray) -> None:
    """Raises ValueError for integers that are no places among so many."""
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
    """Completes a directory with what memory holds.

    Args:
      columns: arrays, and lists that JSON has.
      facts: for the manifest.
      files, identity: what the fingerprint is made of, where that is not all columns: the content
        of some files that are there, and bytes.
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
