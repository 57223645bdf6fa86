"""Builds batches of rows of similar length, padded to one of a few lengths (the buckets).

Each epoch visits the rows in a new order. A row is put into the bucket of the shortest length that
the row does not exceed, and a bucket with `batch_size` rows becomes a batch. Rows that are left at
the end of the epoch move to buckets of longer rows. Therefore only one batch of an epoch may have
empty rows, and an epoch has ceil(rows / batch_size) batches, whatever the buckets are.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from jaxtyping import Bool, Shaped

from brt.data.readers import Reader


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RowReader(Reader):
    """Base class of the readers of rows, which a subclass gathers to padded batches.

    The attribute `lengths` of the store is int [rows].
    """

    # The lengths to which batches are padded, ascending; () pads all to the length of the longest.
    buckets: tuple[int, ...] = ()

    @property
    def longest(self) -> int:
        return int(self.store.lengths.max())

    @abc.abstractmethod
    def gather(self, rows: np.ndarray, length: int) -> Any:
        """Returns a batch of B rows, padded to a length; `rows` is int [B], and -1 an empty row."""

    @staticmethod
    def positions(batch: Any) -> int:
        return batch.valid.size  # `valid` is a mask with an element for each token or frame.

    def __getitem__(self, step: int) -> Any:
        epoch, place = divmod(step, self.steps_per_epoch)
        rows, lengths = self._layout(epoch)
        local = slice(None) if self.lanes is None else list(self.lanes)
        return self.gather(rows[place, local], int(lengths[place]))

    def described(self, step: int) -> list[dict[str, Any]]:
        """Returns a JSON description of each row in the batch of a step, without empty rows.

        Its keys are "lane" (index in the batch), "row" (index in the store) and, if the store has
        ids, "id".
        """
        epoch, place = divmod(step, self.steps_per_epoch)
        rows, ids = self._layout(epoch)[0][place].tolist(), getattr(self.store, "ids", {})
        return [
            {"lane": lane, "row": row, **({"id": ids[row]} if ids else {})}
            for lane, row in enumerate(rows)
            if row >= 0
        ]

    @functools.cached_property
    def steps_per_epoch(self) -> int:
        return -(-len(self.store) // self.batch_size)

    def one_epoch(self, limit: int = 0) -> Iterator[Any]:
        """Yields the batches of the first epoch, which together contain every row once.

        If `limit` is above 0, only one batch is yielded, with the first `limit` rows of the store.
        """
        if limit:
            yield self.gather(np.arange(min(limit, len(self.store))), self.longest)
        else:
            yield from map(self.__getitem__, range(self.steps_per_epoch))

    @classmethod
    def evaluation(
        cls, store: Any, *, batch_size: int, limit: int = 0, **settings: Any
    ) -> Iterator[Any]:
        """Yields the batches of `one_epoch` of a reader that does not shuffle.

        The rows of a batch have similar lengths, and only the last batch may have empty rows.
        """
        reader = cls(store=store, batch_size=batch_size, shuffle=False, **settings)
        yield from reader.one_epoch(limit)

    @property
    def identity(self) -> dict[str, Any]:
        return {**super().identity, "buckets": list(self.lengths)}

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths to which batches are padded, ascending."""
        return self.buckets or (self.longest,)

    def largest(self) -> Any:
        """Returns a batch of empty rows that has the largest shape of all batches."""
        return self.gather(np.full(self.batch_size, -1, np.int32), self.lengths[-1])

    @functools.cached_property
    def _bucket(self) -> np.ndarray:
        """Index of each row's bucket in `lengths`, int [rows]."""
        return np.searchsorted(self.lengths, self.store.lengths)

    def _laid_out(self, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the rows of each batch, int [batches, B] (-1 is empty), and padded lengths."""
        size, bucket = self.batch_size, self._bucket[order]
        used = np.unique(bucket)
        # `left` has the indices in `order` of rows of shorter buckets that did not fill a batch.
        # They go into batches of the next longer bucket.
        left = np.zeros(0, np.int64)
        batches, lengths = [], []
        for i in used:
            places = np.concatenate([np.flatnonzero(bucket == i), left])
            if i == used[-1]:
                empty = -len(places) % size
                places = np.concatenate([places, np.full(empty, len(order))])
            full = len(places) // size * size
            batches.append(places[:full].reshape(-1, size))
            lengths += [self.lengths[i]] * len(batches[-1])
            left = places[full:]
        chosen = np.concatenate(batches)
        # Batches are sorted by the place of their last row in `order`. Otherwise all batches of
        # short rows would be read first.
        by_last = np.argsort(chosen.max(axis=1), kind="stable")
        return np.append(order, -1)[chosen[by_last]], np.array(lengths)[by_last]


def padded(
    rows: np.ndarray,
    read: Callable[[int], np.ndarray],
    length: int,
    dtype: type,
    *,
    width: tuple[int, ...] = (),
    fill: int = 0,
) -> tuple[Shaped[np.ndarray, "B T ..."], Bool[np.ndarray, "B T"]]:
    """Returns rows as a padded array [B, T, *width], and a mask [B, T] that is False for padding.

    Args:
      rows: int [B], indices of rows; -1 is an empty row.
      read: function from the index of a row to the row, an array [length of the row, *width].
      length: the length T to which rows are padded.
      width: the shape of an element of a row.
      fill: the value of padding.
    """
    array = np.full((len(rows), length, *width), fill, dtype)
    mask = np.zeros(array.shape[:2], bool)
    for i in np.flatnonzero(rows >= 0):
        values = read(rows[i])
        array[i, : len(values)], mask[i, : len(values)] = values, True
    return array, mask
