"""Documents and summaries to ids of limited length."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from brt import config
from brt.tasks.summarization.data.tokenization import PairTokenizer


class Encoded(NamedTuple):
    """A text as ids.

    Attributes:
      ids: int32, begun and ended as the tokenizer says, no longer than the limit.
      uncut: ids that there would have been without the limit.
    """

    ids: np.ndarray
    uncut: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoder:
    """Encodes documents and summaries as `config.Pairs` says.

    What is cut is text: the ids at the beginning and the end stay. Summaries are always cut
    behind; a document under "head_tail" is cut in the middle.
    """

    tokenizer: PairTokenizer
    prefix: str
    max_source_length: int
    max_target_length: int
    truncation: str

    @classmethod
    def of(cls, pairs: config.Pairs, tokenizer: PairTokenizer) -> "Encoder":
        """The encoder that `pairs` asks for."""
        names = ("prefix", "max_source_length", "max_target_length", "truncation")
        return cls(tokenizer=tokenizer, **{name: getattr(pairs, name) for name in names})

    def sources(self, documents: Sequence[str]) -> list[Encoded]:
        """The ids of documents, behind the prefix."""
        texts = [self.prefix + document for document in documents]
        tail = self.truncation == "head_tail"
        return [self._wrap(ids, self.max_source_length, tail) for ids in self._encode(texts)]

    def targets(self, summaries: Sequence[str]) -> list[Encoded]:
        """The ids of summaries."""
        return [self._wrap(ids, self.max_target_length, False) for ids in self._encode(summaries)]

    def _encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return self.tokenizer.encode(texts)

    def _wrap(self, ids: np.ndarray, limit: int, tail: bool) -> Encoded:
        begin = self.tokenizer.begin
        special = len(begin) + 1
        kept = cut(ids, limit - special, tail=tail)
        wrapped = np.concatenate([begin, kept, [self.tokenizer.eos_id]]).astype(np.int32)
        return Encoded(wrapped, len(ids) + special)


def cut(ids: np.ndarray, limit: int, *, tail: bool) -> np.ndarray:
    """At most `limit` ids: the first ones, or with `tail` the first and last in equal parts."""
    if len(ids) <= limit:
        return ids
    last = limit // 2 if tail else 0
    return np.concatenate([ids[: limit - last], ids[len(ids) - last :]])
