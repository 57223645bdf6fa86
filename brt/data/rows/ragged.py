"""Ragged arrays: rows of different lengths in one array, which may be on disk."""

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from brt.data.rows.on_disk import OnDisk


@dataclasses.dataclass(frozen=True, eq=False)
class Ragged:
    """Rows of different lengths in one array; row i is values[offsets[i]:offsets[i + 1]].

    Attributes:
      values: the elements of all rows, one after another.
      offsets: int64 [rows + 1].
    """

    values: np.ndarray | OnDisk
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
        """Returns `values` and `offsets` as columns `name` and `name_offsets` of a store.

        `store.Files.ragged` reads these columns.
        """
        return {name: self.values[:], f"{name}_offsets": self.offsets}


def checked(values: np.ndarray | OnDisk, offsets: np.ndarray) -> Ragged:
    """Returns `values` and `offsets` as rows, after checking the offsets.

    Raises:
      ValueError: the offsets do not ascend from 0 to the number of values.
    """
    if (
        offsets.dtype != np.int64 or offsets.ndim != 1 or not len(offsets) or offsets[0] != 0
        or offsets[-1] != len(values) or (offsets[1:] < offsets[:-1]).any()
    ):  # fmt: skip
        raise ValueError(f"rows do not fill {len(values):,} values")
    return Ragged(values, offsets)


def joined(rows: Sequence[np.ndarray], dtype: np.dtype) -> Ragged:
    """Returns rows that are in memory, concatenated to one array."""
    empty = np.zeros((0, *rows[0].shape[1:]) if rows else 0, dtype)
    return Ragged(np.concatenate([empty, *rows]).astype(dtype), offsets([len(row) for row in rows]))


def offsets(lengths: Sequence[int]) -> np.ndarray:
    """Returns int64 [rows + 1], the index where each row begins and where the last one ends.

    Args:
      lengths: the length of each row.
    """
    return np.r_[0, np.cumsum(np.array(lengths, np.int64))].astype(np.int64)


class Writer:
    """Appends rows to a file. It is a context manager, which closes the file."""

    def __init__(self, path: Path, dtype: np.dtype):
        self._file, self._dtype = open(path, "wb"), dtype
        self._lengths: list[int] = []

    def extend(self, rows: Iterable[np.ndarray]) -> None:
        """Appends rows to the file."""
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
    """Returns the rows of a file that `Writer` wrote; they are read when they are indexed.

    Args:
      path: the file.
      dtype: the dtype of its values.
      offsets: int64 [rows + 1], the index of each row's first value.

    Raises:
      ValueError: the size of the file differs from what `offsets` say.
      OSError: the file cannot be read.
    """
    count, rest = divmod(path.stat().st_size, dtype.itemsize)
    if rest or (offsets.size and count != int(offsets.flat[-1])):
        raise ValueError(f"{path.name} has another size than its rows")
    return checked(OnDisk(path, dtype, count), offsets)
