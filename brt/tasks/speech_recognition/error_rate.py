"""Error rates of transcripts, computed from the smallest number of edits (Levenshtein distance)."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from rapidfuzz.distance import Levenshtein


class Errors(NamedTuple):
    """Numbers of edits that turn true transcripts (references) into decoded ones (hypotheses).

    The numbers are counted in tokens or in words, for one transcript or for several together.
    """

    substitutions: int
    insertions: int
    deletions: int
    reference: int  # number of tokens (or words) in the references

    @property
    def count(self) -> int:
        return self.substitutions + self.insertions + self.deletions

    @property
    def rate(self) -> float:
        """Number of edits per token (or word) of the references; the number of edits if the
        references are empty.
        """
        return self.count / max(self.reference, 1)


def count_errors(reference: Sequence[str], hypothesis: Sequence[str]) -> Errors:
    """Counts the fewest edits that turn a reference into a hypothesis, given as tokens or words."""
    edits = Counter(edit.tag for edit in Levenshtein.editops(reference, hypothesis))
    return Errors(edits["replace"], edits["insert"], edits["delete"], len(reference))


def sum_errors(counts: Iterable[Errors]) -> Errors:
    """Adds up the numbers of edits of several transcripts."""
    return Errors(*np.sum([np.zeros(4, np.int64), *counts], axis=0).tolist())
