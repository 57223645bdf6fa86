"""Errors of transcripts: the fewest substitutions, insertions and deletions (Levenshtein)."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np


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
    """The fewest edits that make the reference the hypothesis.

    Among equally few, those that read from the end prefer a match or a substitution, then a
    deletion.
    """
    ids = {token: i for i, token in enumerate(dict.fromkeys([*reference, *hypothesis]))}
    r, h = (np.array([ids[token] for token in text], np.int64) for text in (reference, hypothesis))
    table = distances(r, h)
    i, j = len(r), len(h)
    substitutions = insertions = deletions = 0
    while i or j:
        differs = bool(i and j and r[i - 1] != h[j - 1])
        if i and j and table[i, j] == table[i - 1, j - 1] + differs:
            i, j, substitutions = i - 1, j - 1, substitutions + differs
        elif i and table[i, j] == table[i - 1, j] + 1:
            i, deletions = i - 1, deletions + 1
        else:
            j, insertions = j - 1, insertions + 1
    return Errors(substitutions, insertions, deletions, len(r))


def distances(reference: np.ndarray, hypothesis: np.ndarray) -> np.ndarray:
    """int64 [R + 1, H + 1], the edits between the beginnings of two sequences of ids."""
    places = np.arange(len(hypothesis) + 1)
    table = np.empty((len(reference) + 1, len(places)), np.int64)
    table[0] = places
    for i, token in enumerate(reference, 1):
        above = table[i - 1]
        row = np.r_[i, np.minimum(above[1:] + 1, above[:-1] + (hypothesis != token))]
        table[i] = np.minimum.accumulate(row - places) + places  # insertions, all at once
    return table


def total(found: Iterable[Errors]) -> Errors:
    """Of a corpus: every token counts the same, whatever transcript it is in."""
    return Errors(*np.sum([np.zeros(4, np.int64), *found], axis=0).tolist())
