"""Batches of pairs of similar length, padded to one of a few lengths."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from brt.data.buckets import BucketReader
from brt.data.pairs.store import PairStore
from brt.errors import ConfigError
from brt.types import PairBatch


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PairReader(BucketReader):
    """Pairs by the length of their documents.

    Attributes:
      buckets: lengths of documents, ascending, the last one the store's `max_source_length`;
        (): only that.
    """

    store: PairStore

    def __post_init__(self) -> None:
        if self.buckets and self.buckets[-1] != self.store.max_source_length:
            raise ConfigError(
                f"the last of Pairs.buckets = {self.buckets} must be the length that documents "
                f"were cut to, {self.store.max_source_length}"
            )

    @property
    def row_lengths(self) -> np.ndarray:
        return self.store.source.lengths

    @property
    def longest(self) -> int:
        return self.store.max_source_length

    def gather(self, rows: np.ndarray, length: int) -> PairBatch:
        return gather(self.store, rows, length)


def gather(store: PairStore, rows: np.ndarray, source_length: int) -> PairBatch:
    """The batch of some rows.

    Args:
      rows: int [B], -1 for an empty one.
      source_length: what documents are padded to.
    """
    m, shape = store.manifest, (len(rows), store.max_target_length)
    source = np.full((len(rows), source_length), m["pad_id"], np.int32)
    source_mask = np.zeros(source.shape, bool)
    target, scored = np.full(shape, m["pad_id"], np.int32), np.zeros(shape, bool)
    for i, row in enumerate(rows):
        if row >= 0:
            for ids, array, mask in (
                (store.source[row], source, source_mask), (store.target[row], target, scored),
            ):  # fmt: skip
                array[i, : len(ids)] = ids
                mask[i, : len(ids)] = True
    start = np.full((len(rows), 1), m["decoder_start_id"], np.int32)
    return PairBatch(
        source=source,
        source_mask=source_mask,
        target_in=np.concatenate([start, target[:, :-1]], axis=1),
        target_out=target,
        scored=scored,
        row=np.asarray(rows, np.int32),
    )


def evaluation_batches(
    store: PairStore, *, batch_size: int, buckets: tuple[int, ...] = ()
) -> Iterator[PairBatch]:
    """Every pair once, in batches of similar lengths; empty rows fill up the last batch."""
    reader = PairReader(store=store, batch_size=batch_size, buckets=buckets, shuffle=False)
    for step in range(reader.steps_per_epoch):
        yield reader[step]
