"""ROUGE-N, ROUGE-L and ROUGE-Lsum of two lists of words (Lin 2004, sections 2 and 3).

The scores equal the scores of the package rouge-score 0.1.2, which follows ROUGE-1.5.5.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

Words = Sequence[str]


class Score(NamedTuple):
    """Precision, recall and their harmonic mean F1, each in [0, 1]."""

    precision: float
    recall: float
    f1: float


def _score(hits: int, reference: int, prediction: int) -> Score:
    if not hits:
        return Score(0.0, 0.0, 0.0)
    precision, recall = hits / prediction, hits / reference
    return Score(precision, recall, 2 * precision * recall / (precision + recall))


def rouge_n(reference: Words, prediction: Words, n: int) -> Score:
    """Returns the score of the n-grams (sequences of n words) that two summaries share.

    An n-gram that occurs i times in one summary and j times in the other is shared min(i, j) times.
    """
    grams = [
        Counter(zip(*(words[i:] for i in range(n)), strict=False))
        for words in (reference, prediction)
    ]
    return _score((grams[0] & grams[1]).total(), grams[0].total(), grams[1].total())


def rouge_l(reference: Words, prediction: Words) -> Score:
    """Returns ROUGE-L of the words of a reference summary and of a predicted summary.

    Precision and recall are the length of the longest common subsequence of the two lists of words,
    divided by the number of words of the prediction and of the reference.
    """
    length = _rises(reference, prediction)[-1].bit_count()
    return _score(length, len(reference), len(prediction))


def rouge_l_sum(reference: Sequence[Words], prediction: Sequence[Words]) -> Score:
    """Returns ROUGE-Lsum of two summaries, each a list of sentences.

    Each sentence of the reference has a longest common subsequence with each sentence of the
    prediction. A word of the reference's sentence is a hit if at least one of these subsequences
    contains the word. As in ROUGE-1.5.5, the hits of a word are at most its occurrences in the
    reference and at most its occurrences in the prediction. Precision and recall are the number of
    hits, divided by the number of words of the prediction and of the reference.
    """
    left = [Counter(word for words in text for word in words) for text in (reference, prediction)]
    totals = [counts.total() for counts in left]
    hits = 0
    for sentence in reference:
        common = set().union(*(_common(sentence, other) for other in prediction))
        for index in sorted(common):
            word = sentence[index]
            if left[0][word] > 0 and left[1][word] > 0:
                hits += 1
                left[0][word] -= 1
                left[1][word] -= 1
    return _score(hits, *totals)


def _rises(a: Words, b: Words) -> list[int]:
    """Computes the lengths of longest common subsequences of all prefixes of `a` and `b`.

    Bit j of entry i of the result is set if the longest common subsequence of a[:i] and b[:j + 1]
    is longer than the one of a[:i] and b[:j]. The number of ones below bit j is therefore the
    length for a[:i] and b[:j]. The algorithm by Hyyrö (2004) computes an entry with a few integer
    operations.
    """
    where: dict[str, int] = {}
    for j, word in enumerate(b):
        where[word] = where.get(word, 0) | 1 << j
    everything = (1 << len(b)) - 1
    # Bit j of `flat` is set if word j of b does not lengthen the longest common subsequence with
    # the words of a that were processed so far.
    flat = everything
    rises = [0]
    for word in a:
        matches = flat & where.get(word, 0)
        flat = ((flat + matches) | (flat - matches)) & everything
        rises.append(everything & ~flat)
    return rises


def _length(rises: int, j: int) -> int:
    """Returns the length of the longest common subsequence with the first j words of `b`."""
    return (rises & ((1 << j) - 1)).bit_count()


def _common(a: Words, b: Words) -> list[int]:
    """Returns indices into `a` of the longest common subsequence that rouge-score chooses."""
    rises, i, j, indices = _rises(a, b), len(a), len(b), []
    while i and j:
        if a[i - 1] == b[j - 1]:
            i, j = i - 1, j - 1
            indices.append(i)
        elif _length(rises[i], j - 1) > _length(rises[i - 1], j):
            j -= 1
        else:
            i -= 1
    return indices
