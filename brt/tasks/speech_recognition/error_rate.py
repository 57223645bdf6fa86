"""Error rates of transcripts, by the smallest number of edits (the Levenshtein distance)."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from rapidfuzz.distance import Levenshtein


class Errors(NamedTuple):
    """Numbers of edits that turn reference transcripts into hypotheses, summed over transcripts.

    Attributes:
      substitutions, insertions, deletions: numbers of edits of each kind.
      reference: number of tokens in the references.
    """

    substitutions: int
    insertions: int
    deletions: int
    reference: int

    @property
    def count(self) -> int:
        """Number of all edits."""
        return self.substitutions + self.insertions + self.deletions

    @property
    def rate(self) -> float:
        """Errors per token of the reference, which counts as one token if it is empty."""
        return self.count / max(self.reference, 1)


def errors(reference: Sequence[str], hypothesis: Sequence[str]) -> Errors:
    """Counts the fewest edits that turn a reference into a hypothesis, both lists of tokens."""
    edits = Counter(edit.tag for edit in Levenshtein.editops(reference, hypothesis))
    return Errors(edits["replace"], edits["insert"], edits["delete"], len(reference))


def total(counts: Iterable[Errors]) -> Errors:
    """Returns the sum of the counts of several transcripts."""
    return Errors(*np.sum([np.zeros(4, np.int64), *counts], axis=0).tolist())
