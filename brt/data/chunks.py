"""Chunks of text, and the base class of tokenizers that encode text chunk by chunk.

Documents may be larger than the memory, so text is encoded in chunks. `cut` chooses the ends of the
chunks so that they depend on the text only, and not on the sizes of the parts in which the text is
read.
"""

import abc
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

# A chunk has at most this number of characters, because sentencepiece is slow on longer chunks.
CHUNK = 4096

Ids = Sequence[int | np.integer] | np.ndarray


def end_of_line(text: str, start: int, stop: int) -> int:
    """Returns where the chunk that begins at index `start` ends, which is at most `stop`.

    The chunk ends after the last newline before `stop`. Without a newline, it ends before the last
    space; if several spaces stand there in a row, it ends before the first of them. Without a
    space, it ends at `stop`.
    """
    newline = text.rfind("\n", start, stop)
    if newline >= 0:
        return newline + 1
    space = text.rfind(" ", start + 1, stop)
    while space > start and text[space - 1] == " ":
        space -= 1
    return space if space > start else stop


def end_of_word(text: str, start: int, stop: int) -> int:
    """Returns where a chunk ends, like `end_of_line`, but at a space between letters if possible.

    The pre-tokenizers of all byte-level tokenizers cut a text at a space between two ASCII letters,
    whatever text precedes and follows, so the end of the chunk does not change the ids. The chunk
    ends before the last such space before `stop`, or without one where `end_of_line` says. `text`
    must have a character at `stop`.
    """
    space = stop
    while (space := text.rfind(" ", start + 1, space)) >= 0:
        around = text[space - 1] + text[space + 1]
        if around.isascii() and around.isalpha():
            return space
    return end_of_line(text, start, stop)


def cut(
    chunks: Iterable[str], size: int, end: Callable[[str, int, int], int] = end_of_line
) -> Iterator[str]:
    """Divides a text, given in parts of any length, into chunks of at most `size` characters."""
    text = ""
    for chunk in chunks:
        text += chunk
        start = 0
        while len(text) - start > size:
            stop = end(text, start, start + size)
            yield text[start:stop]
            start = stop
        text = text[start:]
    if text:
        yield text


class ChunkTokenizer(abc.ABC):
    """Base class of tokenizers that encode long texts chunk by chunk.

    A subclass defines `encode_chunks` and sets `_bytes`, the bytes that each id stands for. It may
    also set `_chunk_end`, the function that determines where chunks end (see `cut`).
    """

    _bytes: list[bytes]
    _chunk_end: staticmethod = staticmethod(end_of_line)

    @abc.abstractmethod
    def encode_chunks(self, chunks: list[str]) -> list[np.ndarray]:
        """Returns the ids of each chunk, an int32 array [T]; chunks are encoded in parallel."""

    def cut(self, parts: Iterable[str]) -> Iterator[str]:
        """Yields chunks of a text that can be encoded separately, wherever its `parts` end."""
        return cut(parts, CHUNK, self._chunk_end)

    def encode(self, text: str) -> np.ndarray:
        chunks = [*self.cut([text])]
        return np.concatenate([np.zeros(0, np.int32), *self.encode_chunks(chunks)])

    def decode_bytes(self, ids: Ids) -> bytes:
        pool, starts, lengths = self._pool
        ids = np.asarray(ids, np.int64)
        sizes = lengths[ids]
        ends = np.cumsum(sizes)
        # For each byte of the result, `source` is the index of the byte in the pool.
        source = np.repeat(starts[ids] - ends + sizes, sizes)
        source += np.arange(len(source))
        return pool[source].tobytes()

    @functools.cached_property
    def _pool(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The bytes of all ids, uint8 [bytes], and for each id its first index and its length."""
        lengths = np.array([*map(len, self._bytes)], np.int64)
        return np.frombuffer(b"".join(self._bytes), np.uint8), np.cumsum(lengths) - lengths, lengths
