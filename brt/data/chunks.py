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
    """Returns the end of the chunk that begins at index `start` of a text: an index of at most
    `stop`, at which the next chunk begins.

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
    """Returns the end of the chunk that begins at index `start` of a text: an index of at most
    `stop`, at which the next chunk begins.

    The chunk ends before the last space between two ASCII letters. The pre-tokenizers of all
    byte-level tokenizers cut a text at such a space, whatever text precedes and follows, so the end
    of the chunk does not change the ids. Without such a space, the chunk ends where `end_of_line`
    says. `text` must have a character at `stop`.
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
    """Divides a text into chunks of at most `size` characters, and yields the chunks.

    Args:
      chunks: the text, in parts of any length.
      size: the largest number of characters in a chunk.
      end: the function that determines where a chunk ends, `end_of_line` or `end_of_word`.
    """
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
        """Divides a text into chunks that can be encoded separately, and yields the chunks.

        Args:
          parts: consecutive parts of the text, of any length, as they were read. The chunks do not
            depend on where the parts end.
        """
        return cut(parts, CHUNK, self._chunk_end)

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids of a text, int32 [T]."""
        chunks = [*self.cut([text])]
        return np.concatenate([np.zeros(0, np.int32), *self.encode_chunks(chunks)])

    def decode_bytes(self, ids: Ids) -> bytes:
        """Returns the concatenated UTF-8 bytes that the ids stand for."""
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
