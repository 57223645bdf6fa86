"""Batches of windows of similar length, padded to one of a few lengths."""

import dataclasses

import numpy as np

from brt.data.buckets import BucketReader
from brt.data.questions.store import QuestionStore
from brt.types import TextBatch


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class QuestionReader(BucketReader):
    """Windows by their tokens; `targets` of a batch is where the answer starts and ends.

    Attributes:
      max_length: that no window exceeds.
    """

    store: QuestionStore
    max_length: int

    @property
    def row_lengths(self) -> np.ndarray:
        return self.store.lengths

    @property
    def longest(self) -> int:
        return self.max_length

    def gather(self, rows: np.ndarray, length: int) -> TextBatch:
        tokens = np.zeros((len(rows), length), np.int32)
        valid = np.zeros(tokens.shape, bool)
        targets = np.zeros((len(rows), 2), np.int32)
        for i, row in enumerate(rows):
            if row >= 0:
                ids = self.store.tokens(row)
                tokens[i, : len(ids)] = ids
                valid[i, : len(ids)] = True
                targets[i] = self.store.row(row)[3:]
        there = np.asarray(rows, np.int32)
        scored = np.broadcast_to(there[:, None] >= 0, targets.shape).copy()
        return TextBatch(tokens, valid, targets, scored, there)
