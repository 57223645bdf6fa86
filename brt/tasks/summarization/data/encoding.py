"""Encodes documents and summaries as token ids, and cuts long texts."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from brt import config
from brt.tasks.summarization.data.tokenization import PairTokenizer


class Encoded(NamedTuple):
    """The token ids of a text, including the tokenizer's start and end ids."""

    ids: np.ndarray  # int32 [T], after the text was cut
    uncut: int  # number of ids before the text was cut


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoder:
    """Encodes documents and summaries as token ids, according to the config section Pairs.

    Long texts are cut, but the special ids at start and end remain. A summary loses its end. A
    document loses its end or, with the truncation "head_tail", its middle. The truncation "error"
    is for callers; the encoder itself treats it like "head".
    """

    tokenizer: PairTokenizer
    prefix: str  # text before every document, such as "summarize: " for T5
    max_source_length: int  # largest number of ids, including special ids
    max_target_length: int
    truncation: str

    @classmethod
    def of(cls, pairs: config.Pairs, tokenizer: PairTokenizer) -> "Encoder":
        names = ("prefix", "max_source_length", "max_target_length", "truncation")
        return cls(tokenizer=tokenizer, **{name: getattr(pairs, name) for name in names})

    def sources(self, documents: Sequence[str]) -> list[Encoded]:
        """Returns the token ids of documents, each cut together with the prefix before it."""
        texts = [self.prefix + document for document in documents]
        tail = self.truncation == "head_tail"
        return [self._wrap(ids, self.max_source_length, tail) for ids in self._encode(texts)]

    def targets(self, summaries: Sequence[str]) -> list[Encoded]:
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
    """Returns at most `limit` of the ids of a text: the first ones or, with `tail`, half of them
    from the start and half from the end.
    """
    if len(ids) <= limit:
        return ids
    last = limit // 2 if tail else 0
    return np.concatenate([ids[: limit - last], ids[len(ids) - last :]])
