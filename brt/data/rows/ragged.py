"""Ragged arrays: rows of different lengths, concatenated in one array in memory or on disk."""

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from brt.data.rows.on_disk import OnDisk


@dataclasses.dataclass(frozen=True, eq=False)
class Ragged:
    """Rows of different lengths; row i is values[offsets[i]:offsets[i + 1]]."""

    values: np.ndarray | OnDisk  # [elements, ...], the elements of all rows, one after another
    # int64 [rows + 1], the index of each row's first element, and the number of elements
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

    def columns(self, name: str) -> dict[str, np.ndarray]:
        """Returns both arrays, named as a store of rows saves them; see `store.Files.ragged`."""
        return {name: self.values[:], f"{name}_offsets": self.offsets}


def checked(values: np.ndarray | OnDisk, offsets: np.ndarray) -> Ragged:
    """Returns a ragged array; ValueError if the offsets do not ascend from 0 to len(values)."""
    if (
        offsets.dtype != np.int64 or offsets.ndim != 1 or not len(offsets) or offsets[0] != 0
        or offsets[-1] != len(values) or (offsets[1:] < offsets[:-1]).any()
    ):  # fmt: skip
        raise ValueError(f"rows do not fill {len(values):,} values")
    return Ragged(values, offsets)


def from_rows(rows: Sequence[np.ndarray], dtype: np.dtype) -> Ragged:
    """Returns a ragged array of arrays [length of the row, ...] with the same other axes."""
    empty = np.zeros((0, *rows[0].shape[1:]) if rows else 0, dtype)
    return Ragged(np.concatenate([empty, *rows]).astype(dtype), offsets([len(row) for row in rows]))


def offsets(lengths: Sequence[int]) -> np.ndarray:
    """Returns int64 [rows + 1], the index at which each row begins, and the sum of all lengths."""
    return np.r_[0, np.cumsum(np.array(lengths, np.int64))].astype(np.int64)


class Writer:
    """Writes the rows of a ragged array to a file, which contains nothing but the values."""

    def __init__(self, path: Path, dtype: np.dtype):
        self._file, self._dtype = open(path, "wb"), dtype
        self._lengths: list[int] = []

    def extend(self, rows: Iterable[np.ndarray]) -> None:
        """Appends rows, arrays [length of the row, ...], to the file."""
        for row in rows:
            self._file.write(np.ascontiguousarray(row, self._dtype).data)
            self._lengths.append(len(row))

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def offsets(self) -> np.ndarray:
        """Offsets of the rows that were written so far, int64 [rows + 1]."""
        return offsets(self._lengths)


def read(path: Path, dtype: np.dtype, offsets: np.ndarray) -> Ragged:
    """Returns the ragged array in a file of a `Writer`; a row is read when it is indexed."""
    count, rest = divmod(path.stat().st_size, dtype.itemsize)
    if rest or (offsets.size and count != int(offsets.flat[-1])):
        raise ValueError(f"{path.name} has another size than its rows")
    return checked(OnDisk(path, dtype, count), offsets)
