"""Batches of sentences of similar length, padded to one of a few lengths."""

import dataclasses

import numpy as np

from brt.data.buckets import BucketReader
from brt.data.sentences.store import SentenceStore
from brt.data.texts import arrays
from brt.types import TextBatch


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SentenceReader(BucketReader):
    """Sentences by their tokens; `targets` of a batch is one label.

    Attributes:
      max_length: that no row exceeds.
    """

    store: SentenceStore
    max_length: int

    @property
    def row_lengths(self) -> np.ndarray:
        return self.store.tokens.lengths

    @property
    def longest(self) -> int:
        return self.max_length

    def gather(self, rows: np.ndarray, length: int) -> TextBatch:
        targets = self.store.targets[:, None]
        return arrays.padded(rows, length, self.store.tokens.__getitem__, targets)
