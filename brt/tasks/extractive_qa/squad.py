"""Exact match and F1 of answers, as SQuAD's official scripts count them (1.1 and 2.0)."""

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

_ARTICLES = re.compile(r"\b(a|an|the)\b", re.UNICODE)
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Score(NamedTuple):
    """Of one answer, each from 0 to 1."""

    exact: float
    f1: float


def normalized(answer: str) -> str:
    """In small letters, without ASCII punctuation, English articles and more than single spaces."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def score(prediction: str, answers: Sequence[str]) -> Score:
    """Against the answer that it fits best, each figure on its own.

    Args:
      answers: () where nothing is to be found, which "" answers. As in the script of 2.0, those
        that are nothing once normalised count only where all are.
    """
    golds = [text for text in answers if normalized(text)] or [""]
    exact = max(normalized(prediction) == normalized(gold) for gold in golds)
    return Score(float(exact), max(f1(prediction, gold) for gold in golds))


def f1(prediction: str, gold: str) -> float:
    """Of the words that both have; 1 where neither has any."""
    found, wanted = (normalized(text).split() for text in (prediction, gold))
    if not found or not wanted:
        return float(found == wanted)
    same = sum((Counter(found) & Counter(wanted)).values())
    if not same:
        return 0.0
    precision, recall = same / len(found), same / len(wanted)
    return 2 * precision * recall / (precision + recall)
