"""Batches of sentences of similar length, padded to one of a few lengths."""

import dataclasses

import numpy as np

from brt.data.buckets import BucketReader
from brt.data.sentences.store import SentenceStore
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
        tokens = np.zeros((len(rows), length), np.int32)
        valid = np.zeros(tokens.shape, bool)
        targets = np.zeros((len(rows), 1), np.int32)
        for i, row in enumerate(rows):
            if row >= 0:
                ids = self.store.tokens[row]
                tokens[i, : len(ids)] = ids
                valid[i, : len(ids)] = True
                targets[i] = self.store.targets[row]
        there = np.asarray(rows, np.int32)
        return TextBatch(tokens, valid, targets, there[:, None] >= 0, there)
