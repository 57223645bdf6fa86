"""Batches of rows of similar length, padded to one of a few lengths.

In each epoch the rows come in a new order. Each joins the bucket of its length, the shortest
that it fits into; a bucket with `batch_size` rows is a batch. What is left at the end of the
epoch moves up, bucket by bucket, to fill batches there, and only the very last batch has empty
rows: an epoch is ceil(rows / batch_size) batches, whatever the buckets.

Where a row goes is computed from seed and epoch: any step costs the same.
"""

import abc
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class BucketReader(abc.ABC):
    """`reader[step]` is the batch of that step; `brt.data.lanes.iterate` takes one, too.

    Attributes:
      store: has rows: a length, and a `fingerprint` that tells it from others.
      batch_size: rows in all, also where `part` asks for some of them.
      buckets: lengths, ascending; (): only the longest.
      part: the rows of a batch to build, so that each host builds its own; None: all.
    """

    store: Any
    batch_size: int
    buckets: tuple[int, ...] = ()
    seed: int = 0
    shuffle: bool = True
    part: range | None = None

    @property
    @abc.abstractmethod
    def row_lengths(self) -> np.ndarray:
        """int [rows]."""

    @property
    @abc.abstractmethod
    def longest(self) -> int:
        """The length that every row fits into."""

    @abc.abstractmethod
    def gather(self, rows: np.ndarray, length: int) -> Any:
        """The batch of some rows, -1 for an empty one, padded to a length."""

    def __len__(self) -> int:
        """As good as endless."""
        return 1 << 62

    def __getitem__(self, step: int) -> Any:
        epoch, place = divmod(step, self.steps_per_epoch)
        rows, lengths = self._layout(epoch)
        part = slice(None) if self.part is None else slice(self.part.start, self.part.stop)
        return self.gather(rows[place, part], int(lengths[place]))

    @functools.cached_property
    def steps_per_epoch(self) -> int:
        """Steps that read every row once."""
        return -(-len(self.store) // self.batch_size)

    def once(self, limit: int = 0) -> Iterator[Any]:
        """The batches that read every row; with a limit, the first so many rows as one batch."""
        if limit:
            yield self.gather(np.arange(min(limit, len(self.store))), self.longest)
        else:
            yield from map(self.__getitem__, range(self.steps_per_epoch))

    def epoch(self, step: int) -> float:
        """How often the rows have been read before `step`."""
        return step / self.steps_per_epoch

    @property
    def identity(self) -> dict[str, Any]:
        """All that decides what a step reads; `part` only chooses rows. JSON."""
        names = ("batch_size", "seed", "shuffle")
        return {
            "store": self.store.fingerprint,
            "buckets": list(self.lengths),
            **{name: getattr(self, name) for name in names},
        }

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths that rows are padded to."""
        return self.buckets or (self.longest,)

    def largest(self) -> Any:
        """A batch of the largest shape, without rows."""
        return self.gather(np.full(self.batch_size, -1, np.int32), self.lengths[-1])

    @functools.cached_property
    def _bucket(self) -> np.ndarray:
        """int [rows], the place in `lengths` of the shortest that each fits into."""
        return np.searchsorted(self.lengths, self.row_lengths)

    def _layout(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """int [batches, B], the epoch's rows, -1 for none; int [batches], padded lengths."""
        cached = self.__dict__.get("_last_layout")
        if cached and cached[0] == epoch:
            return cached[1]
        layout = self._laid_out(self._order(epoch))
        self.__dict__["_last_layout"] = epoch, layout  # one assignment: safe between threads
        return layout

    def _order(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(len(self.store))
        # Sorting raw bits: NumPy promises their stream, not that of its permutations.
        bits = np.random.PCG64(np.random.SeedSequence([self.seed % 2**64, epoch]))
        return np.argsort(bits.random_raw(len(self.store)), kind="stable")

    def _laid_out(self, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
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
