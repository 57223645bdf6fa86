"""Exact match and F1 of answers, computed as in SQuAD's official scripts (1.1 and 2.0)."""

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

_ARTICLES = re.compile(r"\b(a|an|the)\b", re.UNICODE)
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Score(NamedTuple):
    """Exact match (0 or 1) and F1 (from 0 to 1) of one predicted answer."""

    exact: float
    f1: float


def normalized(answer: str) -> str:
    """Returns an answer in the form in which answers are compared: in lower case, without
    punctuation, English articles and repeated spaces.
    """
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def score(prediction: str, answers: Sequence[str]) -> Score:
    """Returns exact match and F1 of a prediction, each the maximum over the true answers.

    As in the script of SQuAD 2.0, answers that are empty after normalisation count only if all are.
    """
    golds = [text for text in answers if normalized(text)] or [""]
    exact = max(normalized(prediction) == normalized(gold) for gold in golds)
    return Score(float(exact), max(f1(prediction, gold) for gold in golds))


def f1(prediction: str, gold: str) -> float:
    """Returns the F1 score (0 to 1) of the words that a predicted answer shares with a true one."""
    predicted, expected = (normalized(text).split() for text in (prediction, gold))
    if not predicted or not expected:
        return float(predicted == expected)
    same = sum((Counter(predicted) & Counter(expected)).values())
    if not same:
        return 0.0
    precision, recall = same / len(predicted), same / len(expected)
    return 2 * precision * recall / (precision + recall)
