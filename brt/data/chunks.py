"""A text in parts, and the ids that it becomes.

Text is encoded in chunks that `cut` makes, so a document of any length takes little memory.
Where the chunks end depends on the text only, not on how it arrived.
"""

import abc
import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

CHUNK = 4096  # characters of a chunk at most; sentencepiece slows down on longer ones
BATCH = 64  # chunks that are encoded in parallel

Ids = Sequence[int | np.integer] | np.ndarray


def cut(chunks: Iterable[str], size: int) -> Iterator[str]:
    """The same text in chunks of at most `size` characters, however it was cut before.

    A chunk ends behind the last newline within its reach, else before the last space that
    follows another character, else (no whitespace at all) at `size`.
    """
    text = ""
    for chunk in chunks:
        text += chunk
        start = 0
        while len(text) - start > size:
            end = _end(text, start, start + size)
            yield text[start:end]
            start = end
        text = text[start:]
    if text:
        yield text


def _end(text: str, start: int, stop: int) -> int:
    newline = text.rfind("\n", start, stop)
    if newline >= 0:
        return newline + 1
    space = text.rfind(" ", start + 1, stop)
    while space > start and text[space - 1] == " ":
        space -= 1
    return space if space > start else stop


class ChunkTokenizer(abc.ABC):
    """Encodes texts of any length, chunk by chunk, and gives back every byte."""

    _bytes: list[bytes]  # of each id

    @abc.abstractmethod
    def _encode(self, batch: list[str]) -> Iterator[np.ndarray]:
        """The ids of some chunks."""

    def encode(self, text: str) -> np.ndarray:
        return np.concatenate([np.zeros(0, np.int32), *self.encode_chunks([text])])

    def encode_chunks(self, chunks: Iterable[str]) -> Iterator[np.ndarray]:
        found = cut(chunks, CHUNK)
        while batch := list(itertools.islice(found, BATCH)):
            yield from self._encode(batch)

    def decode_bytes(self, ids: Ids) -> bytes:
        return b"".join(self._bytes[i] for i in ids)
