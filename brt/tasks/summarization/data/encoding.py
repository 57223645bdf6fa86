"""Encodes documents and summaries as token ids, and cuts long texts."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from brt import config
from brt.tasks.summarization.data.tokenization import PairTokenizer


class Encoded(NamedTuple):
    """The token ids of a text, which may have been cut to a largest number of ids.

    Attributes:
      ids: int32 [T], the ids after the text was cut, including the tokenizer's start and end ids.
      uncut: number of ids before the text was cut, including start and end ids.
    """

    ids: np.ndarray
    uncut: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoder:
    """Encodes documents and summaries as token ids, according to the config section Pairs.

    Long texts are cut, but the special ids at start and end remain. A summary loses its end. A
    document loses its end or, with the truncation "head_tail", its middle.

    Attributes:
      tokenizer: the tokenizer.
      prefix: text that is put before every document, such as "summarize: " for T5.
      max_source_length: largest number of ids of a document, including special ids.
      max_target_length: largest number of ids of a summary, including special ids.
      truncation: the setting Pairs.truncation. "head" keeps the beginning of a long document, and
        "head_tail" keeps its beginning and its end. "error" is for callers, which raise an error if
        a text was cut; the encoder itself treats "error" like "head".
    """

    tokenizer: PairTokenizer
    prefix: str
    max_source_length: int
    max_target_length: int
    truncation: str

    @classmethod
    def of(cls, pairs: config.Pairs, tokenizer: PairTokenizer) -> "Encoder":
        """Returns the encoder that a config section describes.

        Args:
          pairs: the section Pairs of the config.
          tokenizer: the tokenizer.
        """
        names = ("prefix", "max_source_length", "max_target_length", "truncation")
        return cls(tokenizer=tokenizer, **{name: getattr(pairs, name) for name in names})

    def sources(self, documents: Sequence[str]) -> list[Encoded]:
        """Returns the token ids of documents. The prefix stands before each document, and both
        together are cut to `max_source_length` tokens.
        """
        texts = [self.prefix + document for document in documents]
        tail = self.truncation == "head_tail"
        return [self._wrap(ids, self.max_source_length, tail) for ids in self._encode(texts)]

    def targets(self, summaries: Sequence[str]) -> list[Encoded]:
        """Returns the token ids of summaries, cut to `max_target_length`."""
        return [self._wrap(ids, self.max_target_length, False) for ids in self._encode(summaries)]

    def _encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return self.tokenizer.encode(texts)

    def _wrap(self, ids: np.ndarray, limit: int, tail: bool) -> Encoded:
        begin = self.tokenizer.begin
        special = len(begin) + 1
        shortened = cut(ids, limit - special, tail=tail)
        wrapped = np.concatenate([begin, shortened, [self.tokenizer.eos_id]]).astype(np.int32)
        return Encoded(wrapped, len(ids) + special)


def cut(ids: np.ndarray, limit: int, *, tail: bool) -> np.ndarray:
    """Returns at most `limit` of the ids of a text.

    Args:
      ids: int [T], the ids.
      limit: the largest number of ids.
      tail: False returns the first `limit` ids of a longer text. True returns half of `limit` ids
        from the start of the text, and half of `limit` ids from its end.
    """
    if len(ids) <= limit:
        return ids
    last = limit // 2 if tail else 0
    return np.concatenate([ids[: limit - last], ids[len(ids) - last :]])
