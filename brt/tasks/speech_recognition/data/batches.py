"""Batches of utterances of similar length, padded to one of a few lengths."""

import dataclasses

import numpy as np

from brt.data.rows.batches import RowReader, padded
from brt.tasks.speech_recognition.data.store import SpeechStore
from brt.types import SpeechBatch


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SpeechReader(RowReader):
    """Reader that yields batches of utterances with similar numbers of frames.

    Attributes:
      store: the utterances of a split.
    """

    store: SpeechStore

    def gather(self, rows: np.ndarray, length: int) -> SpeechBatch:
        """Returns a batch of utterances, padded to `length` frames.

        Args:
          rows: int [B], indices of utterances in the store; -1 is an empty row.
          length: the number of frames to which utterances are padded.
        """
        store, tokens = self.store, max(int(self.store.targets.lengths.max()), 1)
        features = padded(rows, store.features, length, np.float32, width=(store.width,))
        targets = padded(rows, store.targets.__getitem__, tokens, np.int32)
        return SpeechBatch(*features, *targets, np.asarray(rows, np.int32))


evaluation_batches = SpeechReader.evaluation
