"""Batches of rows of similar length, padded to one of a few lengths.

In each epoch the rows come in a new order. Each joins the bucket of its length, the shortest
that it fits into; a bucket with `batch_size` rows is a batch. What is left at the end of the
epoch moves up, bucket by bucket, to fill batches there, and only the very last batch has empty
rows: an epoch is ceil(rows / batch_size) batches, whatever the buckets.
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
    """The reader of all kinds of rows; one of them says what a batch is made of.

    Attributes:
      store: has `lengths`, of the rows.
      buckets: lengths, ascending; (): only the longest.
    """

    buckets: tuple[int, ...] = ()

    @property
    def longest(self) -> int:
        """The length that every row fits into."""
        return int(self.store.lengths.max())

    @abc.abstractmethod
    def gather(self, rows: np.ndarray, length: int) -> Any:
        """The batch of some rows, -1 for an empty one, padded to a length."""

    @staticmethod
    def positions(batch: Any) -> int:
        return batch.valid.size

    def __getitem__(self, step: int) -> Any:
        epoch, place = divmod(step, self.steps_per_epoch)
        rows, lengths = self._layout(epoch)
        own = slice(None) if self.lanes is None else list(self.lanes)
        return self.gather(rows[place, own], int(lengths[place]))

    def described(self, step: int) -> list[dict[str, Any]]:
        epoch, place = divmod(step, self.steps_per_epoch)
        found, ids = self._layout(epoch)[0][place].tolist(), getattr(self.store, "ids", {})
        return [
            {"lane": lane, "row": row, **({"id": ids[row]} if ids else {})}
            for lane, row in enumerate(found)
            if row >= 0
        ]

    @functools.cached_property
    def steps_per_epoch(self) -> int:
        return -(-len(self.store) // self.batch_size)

    def once(self, limit: int = 0) -> Iterator[Any]:
        """The batches that read every row; with a limit, the first so many rows as one batch."""
        if limit:
            yield self.gather(np.arange(min(limit, len(self.store))), self.longest)
        else:
            yield from map(self.__getitem__, range(self.steps_per_epoch))

    @classmethod
    def evaluation(
        cls, store: Any, *, batch_size: int, limit: int = 0, **settings: Any
    ) -> Iterator[Any]:
        """Every row once, in batches of similar lengths; empty rows fill up the last batch.

        Args:
          limit: see `once`.
          settings: attributes of the reader.
        """
        yield from cls(store=store, batch_size=batch_size, shuffle=False, **settings).once(limit)

    @property
    def identity(self) -> dict[str, Any]:
        return {**super().identity, "buckets": list(self.lengths)}

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths that rows are padded to."""
        return self.buckets or (self.longest,)

    def largest(self) -> Any:
        """It has no rows."""
        return self.gather(np.full(self.batch_size, -1, np.int32), self.lengths[-1])

    @functools.cached_property
    def _bucket(self) -> np.ndarray:
        """int [rows], the place in `lengths` of the shortest that each fits into."""
        return np.searchsorted(self.lengths, self.store.lengths)

    def _laid_out(self, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int [batches, B], the epoch's rows, -1 for none; int [batches], padded lengths."""
        size, bucket = self.batch_size, self._bucket[order]
        used = np.unique(bucket)
        left = np.zeros(0, np.int64)  # places in the order that filled no batch so far
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
        found = np.concatenate(batches)
        turn = np.argsort(found.max(axis=1), kind="stable")  # a batch is ready with its last row
        return np.append(order, -1)[found[turn]], np.array(lengths)[turn]


def padded(
    rows: np.ndarray,
    read: Callable[[int], np.ndarray],
    length: int,
    dtype: type,
    *,
    width: tuple[int, ...] = (),
    fill: int = 0,
) -> tuple[Shaped[np.ndarray, "B T ..."], Bool[np.ndarray, "B T"]]:
    """What some rows hold, side by side, and where it is no padding.

    Args:
      rows: int [B], -1 for an empty one.
      read: [T, *width] of a row.
    """
    array = np.full((len(rows), length, *width), fill, dtype)
    there = np.zeros(array.shape[:2], bool)
    for i in np.flatnonzero(rows >= 0):
        found = read(rows[i])
        array[i, : len(found)], there[i, : len(found)] = found, True
    return array, there
