"""Batches of pairs of similar length, padded to one of a few lengths."""

import dataclasses

import numpy as np

from brt.data.rows.batches import RowReader, padded
from brt.errors import ConfigError
from brt.tasks.summarization.data.store import PairStore
from brt.types import PairBatch


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PairReader(RowReader):
    """Reader of pairs whose documents have similar lengths, so that little padding is needed.

    `buckets` are padded lengths of documents, ascending, of which the last is the store's
    `max_source_length`. If there are no buckets, all documents are padded to that length.
    """

    store: PairStore

    def __post_init__(self) -> None:
        if self.buckets and self.buckets[-1] != self.longest:
            raise ConfigError(
                f"the last of Data.buckets = {self.buckets} must be the length that documents "
                f"were cut to, {self.longest}"
            )

    @property
    def longest(self) -> int:
        return self.store.max_source_length

    def gather(self, rows: np.ndarray, length: int) -> PairBatch:
        return gather(self.store, rows, length)

    @staticmethod
    def positions(batch: PairBatch) -> int:
        return batch.source.size + batch.target_in.size


def gather(store: PairStore, rows: np.ndarray, source_length: int) -> PairBatch:
    """Returns a batch of pairs; summaries are padded to the store's `max_target_length`.

    `rows` are indices of pairs in the store; -1 is an empty row.
    """
    pad, start = store.manifest["pad_id"], store.manifest["decoder_start_id"]
    source, mask = padded(rows, store.source.__getitem__, source_length, np.int32, fill=pad)
    target, scored = padded(
        rows, store.target.__getitem__, store.max_target_length, np.int32, fill=pad
    )
    starts = np.full((len(rows), 1), start, np.int32)
    return PairBatch(
        source=source,
        source_mask=mask,
        target_in=np.concatenate([starts, target[:, :-1]], axis=1),
        target_out=target,
        scored=scored,
        row=np.asarray(rows, np.int32),
    )


evaluation_batches = PairReader.evaluation
