"""Builds batches of rows of tokens; a row is one text or a pair of texts."""

import dataclasses

import numpy as np

from brt.data.rows.batches import RowReader, padded
from brt.types import TextBatch


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TextReader(RowReader):
    """Reader of rows of tokens, with targets for each row.

    The store's method `read` returns the ids of a row, int32 [T], and its attribute `row_targets`
    is int or float [rows, targets].
    """

    max_length: int  # the largest number of tokens that a row may have

    @property
    def longest(self) -> int:
        return self.max_length

    def gather(self, rows: np.ndarray, length: int) -> TextBatch:
        rows = np.asarray(rows, np.int32)
        targets = self.store.row_targets
        scored = np.repeat(rows[:, None] >= 0, targets.shape[1], axis=1)
        tokens = padded(rows, self.store.read, length, np.int32)
        return TextBatch(*tokens, np.where(scored, targets[rows], 0), scored, rows)
