"""Batches of token rows of similar length; a row is one text or a pair."""

import dataclasses

import numpy as np

from brt.data.rows.batches import RowReader, padded
from brt.types import TextBatch


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TextReader(RowReader):
    """Reader of rows of tokens.

    Attributes:
      store: has `read`, which returns the ids of a row, and `row_targets` [rows, targets].
      max_length: the length in tokens that no row exceeds.
    """

    max_length: int

    @property
    def longest(self) -> int:
        """The number of tokens that no row exceeds."""
        return self.max_length

    def gather(self, rows: np.ndarray, length: int) -> TextBatch:
        """Returns the batch of the rows with these indices, padded to a length.

        Args:
          rows: int [B], indices of rows in the store; -1 is an empty row.
          length: the number of tokens that rows are padded to.
        """
        rows = np.asarray(rows, np.int32)
        targets = self.store.row_targets
        scored = np.repeat(rows[:, None] >= 0, targets.shape[1], axis=1)
        tokens = padded(rows, self.store.read, length, np.int32)
        return TextBatch(*tokens, np.where(scored, targets[rows], 0), scored, rows)
