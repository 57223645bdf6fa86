"""ROUGE protocols: how texts are split into words and sentences before they are compared.

A ROUGE score is only meaningful together with its protocol: the ROUGE-Lsum of the same summaries
differs by more than ten points between protocols.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

from brt.errors import ConfigError
from brt.tasks.summarization.rouge.porter import stem
from brt.tasks.summarization.rouge.scores import Score, rouge_l, rouge_l_sum, rouge_n
from brt.tasks.summarization.rouge.sentences import sentences

_WORD = re.compile(r"[a-z0-9]+")


class RougeProtocol(NamedTuple):
    """A protocol of ROUGE scores: how texts are split into words and sentences."""

    name: str  # name in the setting Evaluation.rouge and in reports
    stemmer: bool  # applies Porter's stemmer to words of more than three letters
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
        """Returns the words that ROUGE compares: runs of ASCII letters and digits in lower case."""
        words = _WORD.findall(text.lower())
        if not self.stemmer:
            return words
        return [word for word in (stem(w) if len(w) > 3 else w for w in words) if word]

    def score(self, reference: str, prediction: str) -> dict[str, Score]:
        """Returns "rouge1", "rouge2", "rougeL" and "rougeLsum", all 0 if one text has no words."""
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


_SPACED = 'at line breaks and after " . "'
PROTOCOLS = {
    protocol.name: protocol
    for protocol in (
        # The protocol "hf" follows the script run_summarization.py of Hugging Face's transformers,
        # but splits sentences by rules instead of NLTK's trained model.
        RougeProtocol("hf", True, sentences, "at line breaks and by rules"),
        # The protocol "t5" follows the function `rouge` in T5's t5.evaluation.metrics. What the
        # papers about T5 call ROUGE-L is called rougeLsum here.
        RougeProtocol("t5", False, _spaced_periods, _SPACED),
        # LongT5 uses the protocol of T5. The protocol has a second name, so that tables can show
        # which paper the figures are compared with.
        RougeProtocol("longt5", False, _spaced_periods, _SPACED),
    )
}


def get_protocol(name: str) -> RougeProtocol:
    if name not in PROTOCOLS:
        raise ConfigError(
            f"there is no ROUGE protocol {name!r}; there are {', '.join(sorted(PROTOCOLS))}"
        )
    return PROTOCOLS[name]
