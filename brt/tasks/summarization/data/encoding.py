"""Encodes documents and summaries as ids of limited length."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from brt import config
from brt.tasks.summarization.data.tokenization import PairTokenizer


class Encoded(NamedTuple):
    """The ids of a text.

    Attributes:
      ids: int32 [T], with the tokenizer's start and end ids; T does not exceed the limit.
      uncut: number of ids that the text has without the limit.
    """

    ids: np.ndarray
    uncut: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoder:
    """Encodes documents and summaries as ids, according to the config section Pairs.

    Long texts are cut, but the special ids at start and end remain. A summary loses its end. A
    document loses its end or, with the truncation "head_tail", its middle.

    Attributes:
      tokenizer: the tokenizer.
      prefix: text before every document.
      max_source_length: largest number of ids of a document.
      max_target_length: largest number of ids of a summary.
      truncation: Pairs.truncation: "error" refuses documents that are too long, "head" keeps their
        beginning, and "head_tail" keeps their beginning and their end.
    """

    tokenizer: PairTokenizer
    prefix: str
    max_source_length: int
    max_target_length: int
    truncation: str

    @classmethod
    def of(cls, pairs: config.Pairs, tokenizer: PairTokenizer) -> "Encoder":
        """Returns the encoder that `pairs`, a section of the config, describes."""
        names = ("prefix", "max_source_length", "max_target_length", "truncation")
        return cls(tokenizer=tokenizer, **{name: getattr(pairs, name) for name in names})

    def sources(self, documents: Sequence[str]) -> list[Encoded]:
        """Returns the ids of documents; the prefix is put before each document."""
        texts = [self.prefix + document for document in documents]
        tail = self.truncation == "head_tail"
        return [self._wrap(ids, self.max_source_length, tail) for ids in self._encode(texts)]

    def targets(self, summaries: Sequence[str]) -> list[Encoded]:
        """Returns the ids of summaries."""
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
    """Returns at most `limit` ids: the first ids, or if `tail` is True, half from each end."""
    if len(ids) <= limit:
        return ids
    last = limit // 2 if tail else 0
    return np.concatenate([ids[: limit - last], ids[len(ids) - last :]])
