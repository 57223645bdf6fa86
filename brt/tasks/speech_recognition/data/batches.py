"""Batches of utterances of similar length, padded to one of a few lengths."""

import dataclasses

import numpy as np

from brt.data.rows.batches import RowReader, padded
from brt.tasks.speech_recognition.data.store import SpeechStore
from brt.types import SpeechBatch


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SpeechReader(RowReader):
    store: SpeechStore

    def gather(self, rows: np.ndarray, length: int) -> SpeechBatch:
        store, tokens = self.store, max(int(self.store.targets.lengths.max()), 1)
        features = padded(rows, store.features, length, np.float32, width=(store.width,))
        targets = padded(rows, store.targets.__getitem__, tokens, np.int32)
        return SpeechBatch(*features, *targets, np.asarray(rows, np.int32))


evaluation_batches = SpeechReader.evaluation
