"""ROUGE (Lin 2004) with named protocols, and its mean over documents with confidence intervals.

A protocol says how texts are split into words and sentences before they are compared. A ROUGE score
is only meaningful together with its protocol: the ROUGE-Lsum of the same summaries differs by more
than ten points between protocols.

The scores equal the scores of the package rouge-score 0.1.2, which follows ROUGE-1.5.5; the tests
compare the two. The package itself takes too long for evaluations. On one core of an AMD EPYC,
10,000 pairs of summaries take these times in seconds:

                                       package   this implementation
    200 words a summary                    294                    20
    500 words a summary                  1,425                    87

The package fills the table of a longest common subsequence cell by cell; this module computes a row
of the table with a few operations on integers.

The stemmer is Porter's with the extensions of NLTK, which ROUGE scorers in Python use.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np

from brt.errors import ConfigError, DataError


@cache
def _stemmer() -> Any:
    from nltk.stem.porter import PorterStemmer  # This import takes long.

    return PorterStemmer()


@lru_cache(maxsize=1 << 16)
def stem(word: str) -> str:
    """Returns Porter's stem of a lower-case word."""
    return _stemmer().stem(word)


Words = Sequence[str]
_TITLES = frozenset(
    "Adm Brig Capt Cmdr Col Cpl Dr Fr Gen Gov Hon Lt Maj Messrs Mlle Mme Mr Mrs Ms Mt Prof Rep "
    "Reps Rev Sen Sens Sgt".split()
)
_WITHIN = frozenset("approx cf e.g i.e viz vs".split())
_NUMBERED = frozenset(
    "art ch eq eqs fig figs no nos nr p pp pt ref refs sec sect secs tab vol vols "
    "jan feb mar apr jun jul aug sep sept oct nov dec".split()
)
_PERHAPS = frozenset("al bros co corp dept etc inc jr llc ltd mfg ph.d plc sr st".split())
_STARTERS = frozenset(
    "a after all also although an and as at because before both but by during each finally first "
    "for from he her here his how however i if in it its many more most my no not now of on one "
    "or other our she since so some such that the their then there these they this those though "
    "to two under until we what when where which while who why with yet you your".split()
)
_CLOSING, _OPENING = "\"'”’»)\\]", "\"'“‘«(\\["
_MARK = re.compile(rf"([.!?…]+)[{_CLOSING}]*\s+(?=[{_OPENING}]*(\w+))")
_ALONE = re.compile(r"(?<=\s)\.\s+")
# _BEFORE matches the word before a period; the word may contain periods. _DOTTED matches single
# letters with periods between them, which are an initial (J) or an abbreviation (U.S or p.m).
_BEFORE = re.compile(r"[^\W\d_](?:[\w.]*\w)?$")
_DOTTED = re.compile(r"(?:[^\W\d_]\.)*[^\W\d_]")
_WORD = re.compile(r"[a-z0-9]+")
SAMPLES, SEED, CONFIDENCE = 1000, 0, 0.95
TEXT = (
    f"mean over documents, {CONFIDENCE:.0%} interval of it from {SAMPLES} bootstrap samples, "
    f"seed {SEED}"
)


class Score(NamedTuple):
    """Precision, recall and their harmonic mean F1, each in [0, 1]."""

    precision: float
    recall: float
    f1: float

    def percentages(self) -> dict[str, float]:
        return {name: 100 * value for name, value in self._asdict().items()}


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

    Precision is the length of the longest common subsequence of the two lists of words, divided by
    the number of words of the prediction; recall is the same length, divided by the number of words
    of the reference.
    """
    length = _rises(reference, prediction)[-1].bit_count()
    return _score(length, len(reference), len(prediction))


def rouge_l_sum(reference: Sequence[Words], prediction: Sequence[Words]) -> Score:
    """Returns ROUGE-Lsum of two summaries, each a list of sentences.

    Each sentence of the reference has a longest common subsequence with each sentence of the
    prediction. A word of the reference's sentence is a hit if at least one of these subsequences
    contains the word. As in ROUGE-1.5.5, a word is counted as a hit at most as often as it occurs
    in the reference, and at most as often as it occurs in the prediction. Precision is the number
    of all hits, divided by the number of words of the prediction; recall is this number, divided by
    the number of words of the reference.
    """
    unused = [Counter(word for words in text for word in words) for text in (reference, prediction)]
    totals = [counts.total() for counts in unused]
    hits = 0
    for sentence in reference:
        common = set().union(*(_common(sentence, other) for other in prediction))
        for index in sorted(common):
            word = sentence[index]
            if unused[0][word] > 0 and unused[1][word] > 0:
                hits += 1
                unused[0][word] -= 1
                unused[1][word] -= 1
    return _score(hits, *totals)


def _rises(a: Words, b: Words) -> list[int]:
    """Computes the lengths of longest common subsequences of all prefixes of `a` and `b`.

    Bit j of entry i of the result is set if the longest common subsequence of a[:i] and b[:j + 1]
    is longer than the one of a[:i] and b[:j]. The number of ones below bit j is therefore the
    length of the longest common subsequence of a[:i] and b[:j]. The algorithm by Hyyrö (2004)
    computes an entry with a few integer operations.
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
    """Returns the length of the longest common subsequence of a[:i] and b[:j].

    `rises` is entry i of the result of `_rises`.
    """
    return (rises & ((1 << j) - 1)).bit_count()


def _common(a: Words, b: Words) -> list[int]:
    """Returns the indices in `a` of a longest common subsequence of `a` and `b`.

    If there are several such subsequences, the result is the one that rouge-score chooses.
    """
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


def sentences(text: str) -> list[str]:
    """Returns the sentences of a text in order.

    White space around sentences is removed, and empty sentences are left out. A sentence ends after
    `.`, `!`, `?` or `…` and any closing quotes and brackets behind the mark, if white space and a
    word follow and the word does not begin with a lower-case letter. Opening quotes and brackets
    may precede the word. A single period does not end a sentence

    * after a title (Mr. Darcy) or an abbreviation within a sentence (e.g. Kansas, Yankees vs.
      Mets);
    * after an abbreviation before a number (Fig. 3, No. 10, Dec. 24);
    * after an initial (J. Austen) or an abbreviation that may end a sentence (Inc., etc., U.S.,
      p.m.), unless the next word often starts a sentence (The, He, In, ...);
    * within a number or a name (3.5, v1.2, example.com), where no white space follows.

    A period that stands alone between spaces, as in tokenised corpora, always ends a sentence, and
    so does a line break.
    """
    parts = []
    for line in text.split("\n"):
        alone = {match.end() for match in _ALONE.finditer(line)}
        ends = {match.end() for match in _MARK.finditer(line) if _is_end(line, match)}
        borders = [0, *sorted(alone | ends), len(line)]
        parts += [line[a:b].strip() for a, b in zip(borders, borders[1:], strict=False)]
    return [sentence for sentence in parts if sentence]


def _is_end(line: str, match: re.Match[str]) -> bool:
    mark, following = match.groups()
    if following[0].islower():
        return False
    word = _BEFORE.search(line, max(match.start() - 40, 0), match.start())
    if mark != "." or not word:
        return True  # Only a single period after a word can belong to an abbreviation.
    before = word[0]
    if before in _TITLES or before.lower() in _WITHIN:
        return False
    if before.lower() in _NUMBERED and any(letter.isdigit() for letter in following):
        return False
    initial = len(before) == 1 and before != "I"
    if initial or before.lower() in _PERHAPS or len(before) > 1 and _DOTTED.fullmatch(before):
        # A single letter after an initial is probably another initial (J. A. Smith) and not the
        # first word of a sentence, even if the letter is a word such as A.
        return following.lower() in _STARTERS and (len(following) > 1 or not initial)
    return True


class RougeProtocol(NamedTuple):
    """A protocol of ROUGE scores: how texts are split into words and sentences."""

    name: str  # name in the setting Evaluation.rouge and in reports
    stemmer: bool  # True if Porter's stemmer is applied to words of more than three letters
    split: Callable[[str], list[str]]  # splits a text into sentences, for ROUGE-Lsum
    sentences: str  # phrase that describes `split`, for reports

    @property
    def text(self) -> str:
        """Description of the protocol, which is printed with every score."""
        stemmer = "Porter stemmer" if self.stemmer else "no stemmer"
        return (
            f"ROUGE, protocol {self.name}: lower-case words of a-z and 0-9, {stemmer}, sentences "
            f"for Lsum {self.sentences}"
        )

    def words(self, text: str) -> list[str]:
        """Returns the runs of a-z and 0-9 in the lower-cased text, as stems if `stemmer` is set."""
        words = _WORD.findall(text.lower())
        if not self.stemmer:
            return words
        return [word for word in (stem(w) if len(w) > 3 else w for w in words) if word]

    def score(self, reference: str, prediction: str) -> dict[str, Score]:
        """Returns the scores by name, such as "rougeL". All are 0 if one text has no words."""
        texts = reference, prediction
        words = self.words(reference), self.words(prediction)
        split = [[self.words(sentence) for sentence in self.split(text)] for text in texts]
        return {
            "rouge1": rouge_n(*words, 1),
            "rouge2": rouge_n(*words, 2),
            "rougeL": rouge_l(*words),
            "rougeLsum": rouge_l_sum(*split),
        }


def _spaced_periods(text: str) -> list[str]:
    return text.replace(" . ", " .\n").split("\n")


PROTOCOLS = {
    protocol.name: protocol
    for protocol in (
        # The protocol "hf" follows the script run_summarization.py of Hugging Face's transformers,
        # but splits sentences by rules instead of NLTK's trained model.
        RougeProtocol("hf", True, sentences, "at line breaks and by rules"),
        # The protocol "t5" follows the function `rouge` in T5's t5.evaluation.metrics, which LongT5
        # uses, too. What the papers about T5 call ROUGE-L is called rougeLsum here.
        RougeProtocol("t5", False, _spaced_periods, 'at line breaks and after " . "'),
    )
}


def get_protocol(name: str) -> RougeProtocol:
    if name not in PROTOCOLS:
        raise ConfigError(
            f"there is no ROUGE protocol {name!r}; there are {', '.join(sorted(PROTOCOLS))}"
        )
    return PROTOCOLS[name]


def aggregate(scores: Sequence[Mapping[str, Score]]) -> dict[str, dict[str, float]]:
    """Returns the means of each kind of score over documents, in percent, as JSON.

    The entries `low` and `high` are the confidence interval of the mean F1. It is estimated by the
    bootstrap: percentiles of the means of many samples of the documents, drawn with replacement.
    The other entries are means over the documents themselves. The class BootstrapAggregator of the
    package rouge-score returns medians of the samples' means instead. brt does not, because the
    random choice of samples changes these medians in the second decimal of a percentage. Raises
    DataError if there are no documents.
    """
    if not scores:
        raise DataError("there are no summaries to score: the split has no documents")
    names = list(scores[0])
    values = np.array([[document[name] for name in names] for document in scores])
    rng = np.random.default_rng(SEED)
    means = np.stack(
        [values[rng.integers(len(values), size=len(values))].mean(axis=0) for _ in range(SAMPLES)]
    )
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means, [tail, 1 - tail], axis=0)
    mid = values.mean(axis=0)
    return {
        name: {
            **Score(*map(float, mid[i])).percentages(),
            "low": 100 * float(low[i, -1]),
            "high": 100 * float(high[i, -1]),
        }
        for i, name in enumerate(names)
    }
