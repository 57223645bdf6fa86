"""Batches of windows of similar length, padded to one of a few lengths."""

import dataclasses

import numpy as np

from brt.data.buckets import BucketReader
from brt.data.questions.store import QuestionStore
from brt.data.texts import arrays
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
        return arrays.padded(rows, length, self.store.tokens, self.store.rows[:, 3:])
