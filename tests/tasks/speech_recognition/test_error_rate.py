import itertools
from functools import cache

import numpy as np
import pytest

from brt.tasks.speech_recognition.evaluation import Errors, count_errors, sum_errors


@cache
def fewest(reference, hypothesis):
    """Returns the edit distance by its recursive definition: the last edit is one of three."""
    if not reference or not hypothesis:
        return len(reference) + len(hypothesis)
    return min(
        fewest(reference[:-1], hypothesis[:-1]) + (reference[-1] != hypothesis[-1]),
        fewest(reference[:-1], hypothesis) + 1,
        fewest(reference, hypothesis[:-1]) + 1,
    )


def test_every_short_pair_has_the_fewest_errors():
    texts = ["".join(t) for n in range(5) for t in itertools.product("ab", repeat=n)]
    for reference, hypothesis in itertools.product(texts, texts):
        found = count_errors(reference, hypothesis)
        assert found.count == fewest(reference, hypothesis)
        assert found.reference == len(reference)
        assert found.insertions - found.deletions == len(hypothesis) - len(reference)
        assert found.deletions + found.substitutions <= len(reference)


def test_errors_of_random_pairs_are_the_fewest_edits():
    rng = np.random.default_rng(0)
    for _ in range(20):
        a, b = ("".join(rng.choice(list("abcd"), rng.integers(0, 40))) for _ in range(2))
        assert count_errors(a, b).count == fewest(tuple(a), tuple(b)) == count_errors(b, a).count


@pytest.mark.parametrize(
    ("reference", "hypothesis", "expected"),
    [
        ("the cat sat", "the cat sat", (0, 0, 0, 3)),
        ("the cat sat", "the bat sat", (1, 0, 0, 3)),
        ("the cat sat", "the sat", (0, 0, 1, 3)),
        ("the cat sat", "oh the cat sat down", (0, 2, 0, 3)),
        ("the cat sat", "", (0, 0, 3, 3)),
        ("", "oh", (0, 1, 0, 0)),
        ("", "", (0, 0, 0, 0)),
        ("a b c d", "b c x d e", (0, 2, 1, 4)),
    ],
)
def test_substitutions_deletions_and_insertions_are_counted(reference, hypothesis, expected):
    assert count_errors(reference.split(), hypothesis.split()) == expected


def test_a_corpus_counts_tokens_not_transcripts():
    found = [count_errors("abcdefgh", "abcdefgh"), count_errors("ab", "cd"), count_errors("", "x")]
    assert sum_errors(found) == Errors(2, 1, 0, 10)
    assert sum_errors(found).rate == 0.3
    assert sum_errors([]) == Errors(0, 0, 0, 0) and sum_errors([]).rate == 0
    assert count_errors("", "xy").rate == 2
