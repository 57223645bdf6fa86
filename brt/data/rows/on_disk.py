"""Arrays in files, of which only the requested parts are read.

Files are not memory-mapped: if a file is truncated while it is mapped, reading a missing page kills
the process, while a short read is an error that can be reported.
"""

import os
import weakref
from pathlib import Path

import numpy as np

from brt.data import manifests
from brt.errors import DataError


class OnDisk:
    """A one-dimensional array in a file, which stays open; reading returns a copy.

    Attributes:
      dtype: the dtype of the values, little-endian.
      size: the number of values that the file must have.

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
        """Returns consecutive values.

        Raises:
          DataError: the file was truncated or cannot be read.
        """
        start, stop, step = part.indices(self.size)
        if step != 1:
            raise ValueError(f"numbers of a file are read one after another, not by {step}")
        values = np.empty(max(stop - start, 0), self.dtype)
        self._read(values, start)
        return values

    def gather(self, places: np.ndarray) -> np.ndarray:
        """Returns the values at the given indices, an array of the same shape as the indices.

        Args:
          places: int64 [..., K], indices below `size`. Everything between the smallest and the
            largest of K indices is read, so these should be close to each other.

        Raises:
          DataError: the file was truncated or cannot be read.
        """
        rows = places.reshape(-1, places.shape[-1])
        first = rows.min(axis=1)
        widths = rows.max(axis=1) - first + 1
        values = np.zeros((len(rows), widths.max(initial=0)), self.dtype)
        for row, start, width in zip(values, first.tolist(), widths.tolist(), strict=True):
            self._read(row[:width], start)
        return np.take_along_axis(values, rows - first[:, None], axis=1).reshape(places.shape)

    def _read(self, into: np.ndarray, start: int) -> None:
        """Fills an array with the values from index `start` on."""
        left, at = memoryview(into).cast("B"), start * self.dtype.itemsize
        while left:
            try:
                count = os.preadv(self._file, [left], at)
            except OSError as error:
                raise DataError(f"{self._path} cannot be read: {error.strerror}") from error
            if not count:
                store = manifests.corpus_directory(self._path.parent)
                raise DataError(
                    f"{self._path} was cut while it was being read: it ends before byte {at:,} of "
                    f"{self.size * self.dtype.itemsize:,}; delete {store} and prepare it again"
                )
            left, at = left[count:], at + count


class InMemory:
    """An array in memory with the interface of `OnDisk`."""

    def __init__(self, values: np.ndarray):
        self.dtype, self.size, self._values = values.dtype, len(values), values

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> np.ndarray:
        """Returns the values of a slice."""
        return self._values[part]

    def gather(self, places: np.ndarray) -> np.ndarray:
        """Returns the values at the indices, an array of the same shape."""
        return self._values[places]
