"""How texts become words and sentences: without it, no ROUGE score says anything.

The same summaries differ by more than ten points of ROUGE-Lsum between protocols.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

from brt.errors import ConfigError
from brt.tasks.summarization.rouge.porter import stem
from brt.tasks.summarization.rouge.scores import Score, rouge_l, rouge_l_sum, rouge_n
from brt.tasks.summarization.rouge.sentences import sentences

_WORD = re.compile(r"[a-z0-9]+")


class Protocol(NamedTuple):
    """A way to score.

    Attributes:
      name: as `--rouge_protocol` and reports have it.
      stemmer: Porter's, on words of more than three letters.
      split: a text into sentences, for ROUGE-Lsum.
      sentences: what `split` does, in words.
    """

    name: str
    stemmer: bool
    split: Callable[[str], list[str]]
    sentences: str

    @property
    def text(self) -> str:
        """What is printed beside every number."""
        stemmer = "Porter stemmer" if self.stemmer else "no stemmer"
        return (
            f"ROUGE, protocol {self.name}: lower-case words of a-z and 0-9, {stemmer}, sentences "
            f"for Lsum {self.sentences}"
        )

    def words(self, text: str) -> list[str]:
        """What is compared; nothing but ASCII letters and digits counts."""
        words = _WORD.findall(text.lower())
        if not self.stemmer:
            return words
        return [word for word in (stem(w) if len(w) > 3 else w for w in words) if word]

    def score(self, reference: str, prediction: str) -> dict[str, Score]:
        """`rouge1`, `rouge2`, `rougeL` and `rougeLsum`; all 0 where a text has no words."""
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
        # run_summarization.py of transformers, with rules in place of NLTK's trained splitter.
        Protocol("hf", True, sentences, "at line breaks and by rules"),
        # `rouge` of t5.evaluation.metrics; what its papers call ROUGE-L is rougeLsum.
        Protocol("t5", False, _spaced_periods, _SPACED),
        # LongT5's tasks use the very function; a name of its own, for its tables.
        Protocol("longt5", False, _spaced_periods, _SPACED),
    )
}


def protocol(name: str) -> Protocol:
    """The protocol of that name.

    Raises:
      ConfigError: there is none.
    """
    if name not in PROTOCOLS:
        raise ConfigError(
            f"there is no ROUGE protocol {name!r}; there are {', '.join(sorted(PROTOCOLS))}"
        )
    return PROTOCOLS[name]
