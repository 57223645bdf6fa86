"""Arrays in files, of which only the requested parts are read.

Files are not memory-mapped. If a memory-mapped file is truncated, reading a missing page kills the
process. An ordinary read of a truncated file returns too few bytes, which can be reported as an
error.
"""

import os
import weakref
from pathlib import Path

import numpy as np

from brt.data import manifests
from brt.errors import DataError


class OnDisk:
    """A one-dimensional array of `size` little-endian values in a file; indexing reads a copy."""

    def __init__(self, path: Path, dtype: np.dtype, size: int):
        self.dtype, self.size = np.dtype(dtype), size
        self._path = path
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, step = part.indices(self.size)
        if step != 1:
            raise ValueError(f"numbers of a file are read one after another, not by {step}")
        values = np.empty(max(stop - start, 0), self.dtype)
        self._read(values, start)
        return values

    def gather(self, places: np.ndarray) -> np.ndarray:
        """Returns the values at the given indices, int64 [..., K]."""
        # For each row of K indices, all values between the smallest and the largest index are read,
        # so the indices of a row should be close to each other.
        rows = places.reshape(-1, places.shape[-1])
        first = rows.min(axis=1)
        widths = rows.max(axis=1) - first + 1
        values = np.zeros((len(rows), widths.max(initial=0)), self.dtype)
        for row, start, width in zip(values, first.tolist(), widths.tolist(), strict=True):
            self._read(row[:width], start)
        return np.take_along_axis(values, rows - first[:, None], axis=1).reshape(places.shape)

    def _read(self, into: np.ndarray, start: int) -> None:
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
    """A one-dimensional array in memory, with the interface of `OnDisk`."""

    def __init__(self, values: np.ndarray):
        self.dtype, self.size, self._values = values.dtype, len(values), values

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> np.ndarray:
        return self._values[part]

    def gather(self, places: np.ndarray) -> np.ndarray:
        return self._values[places]
