"""Base classes of readers, which return the batch of any training step.

An epoch is one pass over all data, in an order that the seed and the number of the epoch determine.
A batch depends only on the seed and the number of the step, so a resumed run can continue at any
step without reading the batches before.

Batches of rows consist of rows of similar length, padded to one of a few lengths (the buckets). A
row is put into the bucket of the shortest length that the row does not exceed, and a bucket with
`batch_size` rows becomes a batch. Rows that are left at the end of the epoch move to buckets of
longer rows. Therefore only one batch of an epoch may have empty rows, and an epoch has
ceil(rows / batch_size) batches, whatever the buckets are.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Shaped

from brt.types import TextBatch


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Reader(abc.ABC):
    """Base class of readers: `reader[step]` is the batch of a step, counted from 0.

    A batch is a NamedTuple of NumPy arrays whose first axis is the rows of the batch (lanes). It
    depends only on the step and on the values in `identity`.
    """

    store: Any  # the data: an object with a length and a `fingerprint`, a hash of its content
    batch_size: int  # the number of rows of a batch, over all processes
    seed: int = 0  # determines the order of the data in each epoch
    shuffle: bool = True  # False reads every epoch in the order of the store, as evaluation does
    # Indices of the rows that the batches of this process contain; None for all rows.
    lanes: Sequence[int] | None = None

    def __len__(self) -> int:
        """Returns a huge number, because the sequence of batches does not end."""
        return 1 << 62

    @abc.abstractmethod
    def __getitem__(self, step: int) -> Any: ...

    @property
    @abc.abstractmethod
    def steps_per_epoch(self) -> int:
        """Number of steps that read all data once."""

    @abc.abstractmethod
    def largest(self) -> Any:
        """Returns a batch of the largest shape, which tells how much memory a step needs."""

    @abc.abstractmethod
    def described(self, step: int) -> list[dict[str, Any]]:
        """Returns the origin of each row of a step, such as a document and a position, as JSON."""

    @staticmethod
    @abc.abstractmethod
    def positions(batch: Any) -> int:
        """Returns the number of tokens or frames in a batch, including padding."""

    @abc.abstractmethod
    def _laid_out(self, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Assigns the data of an epoch to its steps.

        `order` has the indices of the store's items, in the order in which the epoch reads them. A
        subclass defines the content of the two returned arrays, and uses them in `__getitem__`.
        """

    def epoch(self, step: int) -> float:
        """Returns the number of epochs that the steps before `step` read; it may be a fraction."""
        return step / self.steps_per_epoch

    @property
    def identity(self) -> dict[str, Any]:
        """JSON of everything that determines the content of each batch."""
        names = ("batch_size", "seed", "shuffle")
        return {
            "store": self.store.fingerprint, **{name: getattr(self, name) for name in names}
        }  # fmt: skip

    def _layout(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        cached = self.__dict__.get("_last_layout")
        if cached and cached[0] == epoch:
            return cached[1]
        order = np.arange(len(self.store))
        if self.shuffle:
            # NumPy guarantees that the bits of random_raw are the same in every version. There is
            # no such guarantee for NumPy's permutations.
            bits = np.random.PCG64(np.random.SeedSequence([self.seed % 2**64, epoch]))
            order = np.argsort(bits.random_raw(len(order)), kind="stable")
        layout = self._laid_out(order)
        # Assigning an entry of a dict is atomic, so threads that call this method need no lock.
        self.__dict__["_last_layout"] = epoch, layout
        return layout


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RowReader(Reader):
    """Base class of readers whose batches consist of padded rows; subclasses define `gather`.

    The store's attribute `lengths` has the length of each row, int [rows].
    """

    # The lengths to which batches are padded, ascending. () pads all batches to the length of the
    # longest row.
    buckets: tuple[int, ...] = ()

    @property
    def longest(self) -> int:
        return int(self.store.lengths.max())

    @abc.abstractmethod
    def gather(self, rows: np.ndarray, length: int) -> Any:
        """Returns the batch of the `rows`, int [B] (-1: an empty row), padded to `length`."""

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

        The keys of a description are "lane" (the index in the batch), "row" (the index in the
        store) and, if the store has ids, "id".
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
    def settings(cls, section: Any) -> dict[str, Any]:
        """Returns the fields of the reader that a config section determines, by name."""
        return {"buckets": section.buckets}

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
        """Returns the rows of each batch, int [batches, B] (-1: empty), and its padded length."""
        size, bucket = self.batch_size, self._bucket[order]
        used = np.unique(bucket)
        # `waiting` has rows that did not fill a batch of a shorter bucket, as indices in `order`.
        # These rows go into batches of the next longer bucket.
        waiting = np.zeros(0, np.int64)
        batches, lengths = [], []
        for i in used:
            places = np.concatenate([np.flatnonzero(bucket == i), waiting])
            if i == used[-1]:
                empty = -len(places) % size
                places = np.concatenate([places, np.full(empty, len(order))])
            full = len(places) // size * size
            batches.append(places[:full].reshape(-1, size))
            lengths += [self.lengths[i]] * len(batches[-1])
            waiting = places[full:]
        chosen = np.concatenate(batches)
        # Batches are sorted by the place of their last row in `order`. In the order in which they
        # were made, all batches of short rows would be read first.
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


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TextReader(RowReader):
    """Reader of rows of tokens, with targets for each row.

    The store's method `read` returns the ids of a row, int32 [T]. The store's attribute
    `row_targets` has the targets of all rows, int or float [rows, targets].
    """

    max_length: int  # the largest number of tokens that a row may have

    @classmethod
    def settings(cls, section: Any) -> dict[str, Any]:
        return {**super().settings(section), "max_length": section.max_length}

    @property
    def longest(self) -> int:
        return self.max_length

    def gather(self, rows: np.ndarray, length: int) -> TextBatch:
        rows = np.asarray(rows, np.int32)
        targets = self.store.row_targets
        scored = np.repeat(rows[:, None] >= 0, targets.shape[1], axis=1)
        tokens = padded(rows, self.store.read, length, np.int32)
        return TextBatch(*tokens, np.where(scored, targets[rows], 0), scored, rows)
