"""Errors of transcripts: the fewest substitutions, insertions and deletions (Levenshtein)."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from rapidfuzz.distance import Levenshtein


class Errors(NamedTuple):
    """Of one transcript or of many.

    Attributes:
      reference: tokens that were said.
    """

    substitutions: int
    insertions: int
    deletions: int
    reference: int

    @property
    def count(self) -> int:
        return self.substitutions + self.insertions + self.deletions

    @property
    def rate(self) -> float:
        """Errors for each token of the reference; of an empty one, as if it had one."""
        return self.count / max(self.reference, 1)


def errors(reference: Sequence[str], hypothesis: Sequence[str]) -> Errors:
    """The fewest edits that make the reference the hypothesis."""
    edits = Counter(edit.tag for edit in Levenshtein.editops(reference, hypothesis))
    return Errors(edits["replace"], edits["insert"], edits["delete"], len(reference))


def total(found: Iterable[Errors]) -> Errors:
    """Of a corpus: every token counts the same, whatever transcript it is in."""
    return Errors(*np.sum([np.zeros(4, np.int64), *found], axis=0).tolist())
