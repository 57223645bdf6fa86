"""Batches of utterances of similar length, padded to one of a few lengths."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from brt.data.buckets import BucketReader
from brt.data.speech.store import SpeechStore
from brt.types import SpeechBatch


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SpeechReader(BucketReader):
    """Utterances by their frames."""

    store: SpeechStore

    @property
    def row_lengths(self) -> np.ndarray:
        return self.store.lengths

    @property
    def longest(self) -> int:
        return int(self.store.lengths.max())

    def gather(self, rows: np.ndarray, length: int) -> SpeechBatch:
        store, tokens = self.store, max(int(self.store.targets.lengths.max()), 1)
        features = np.zeros((len(rows), length, store.width), np.float32)
        targets = np.zeros((len(rows), tokens), np.int32)
        valid, scored = np.zeros(features.shape[:2], bool), np.zeros(targets.shape, bool)
        for i, row in enumerate(rows):
            if row >= 0:
                for found, array, mask in (
                    (store.features(row), features, valid), (store.targets[row], targets, scored),
                ):  # fmt: skip
                    array[i, : len(found)] = found
                    mask[i, : len(found)] = True
        return SpeechBatch(features, valid, targets, scored, np.asarray(rows, np.int32))


def evaluation_batches(
    store: SpeechStore, *, batch_size: int, buckets: tuple[int, ...] = ()
) -> Iterator[SpeechBatch]:
    """Every utterance once; empty rows fill up the last batch."""
    reader = SpeechReader(store=store, batch_size=batch_size, buckets=buckets, shuffle=False)
    for step in range(reader.steps_per_epoch):
        yield reader[step]
