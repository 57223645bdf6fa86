"""Numbers in a file, read where they are asked for.

They are not memory-mapped: to read a page behind the end of a file that somebody has cut meanwhile
kills a process, and a short read is an error that can be told.
"""

import os
import weakref
from pathlib import Path

import numpy as np

from brt.data import manifests
from brt.errors import DataError


class OnDisk:
    """One axis of numbers in a file, which stays open; what is read is a copy.

    Attributes:
      dtype: of the numbers, little-endian.
      size: how many numbers the file has to have.

    Raises:
      OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, dtype: np.dtype, size: int):
        self.dtype, self.size = np.dtype(dtype), size
        self._path = path
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> np.ndarray:
        """Numbers one after another, as an array has them.

        Raises:
          DataError: the file has been cut, or cannot be read.
        """
        start, stop, step = part.indices(self.size)
        if step != 1:
            raise ValueError(f"numbers of a file are read one after another, not by {step}")
        found = np.empty(max(stop - start, 0), self.dtype)
        self._read(found, start)
        return found

    def gather(self, places: np.ndarray) -> np.ndarray:
        """The numbers at places that are near each other along the last axis.

        Args:
          places: int64 [..., K], each from 0 to `size`; what lies between those of one row is read.

        Returns:
          dtype [..., K].

        Raises:
          DataError: the file has been cut, or cannot be read.
        """
        rows = places.reshape(-1, places.shape[-1])
        first = rows.min(axis=1)
        widths = rows.max(axis=1) - first + 1
        found = np.zeros((len(rows), widths.max(initial=0)), self.dtype)
        for row, start, width in zip(found, first.tolist(), widths.tolist(), strict=True):
            self._read(row[:width], start)
        return np.take_along_axis(found, rows - first[:, None], axis=1).reshape(places.shape)

    def _read(self, into: np.ndarray, start: int) -> None:
        """Fills an array with the numbers from `start` on."""
        left, at = memoryview(into).cast("B"), start * self.dtype.itemsize
        while left:
            try:
                count = os.preadv(self._file, [left], at)
            except OSError as error:
                raise DataError(f"{self._path} cannot be read: {error.strerror}") from error
            if not count:
                whole = manifests.preparation(self._path.parent)
                raise DataError(
                    f"{self._path} was cut while it was being read: it ends before byte {at:,} of "
                    f"{self.size * self.dtype.itemsize:,}; delete {whole} and prepare it again"
                )
            left, at = left[count:], at + count


class InMemory:
    """The same as `OnDisk`, of an array that is in memory."""

    def __init__(self, values: np.ndarray):
        self.dtype, self.size, self._values = values.dtype, len(values), values

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> np.ndarray:
        """Returns the numbers from one place to another."""
        return self._values[part]

    def gather(self, places: np.ndarray) -> np.ndarray:
        """Returns the numbers at the places, an array of the same shape."""
        return self._values[places]
