"""Encodes documents chunk by chunk, and counts their bytes, characters and words.

The chunks of several documents are encoded together, so that all cores are used for short
documents, too. While a thread encodes some chunks, the caller's thread reads the next ones.
"""

import re
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from brt.data.documents import Document
from brt.data.tokenizers import Tokenizer

BATCH = 1 << 20  # About this number of characters is encoded at a time.

# In UTF-8, bytes below 128 are ASCII characters. This table maps ASCII whitespace, as `str.split`
# knows it, to a space, and all other bytes to "x".
_WORD_TABLE = bytes(32 if i < 128 and chr(i).isspace() else ord("x") for i in range(256))
_WIDE_SPACE = re.compile(
    "[" + "".join(c for c in map(chr, range(128, 0x10000)) if c.isspace()) + "]"
)


class Chunk(NamedTuple):
    """A part of a document. Only a document without text has a chunk without text."""

    name: str | None  # the name of the document if this is its first chunk
    text: str


class Encoded(NamedTuple):
    """A chunk, as in `Chunk`, and its tokens `ids`, int32 [T]."""

    name: str | None
    text: str
    ids: np.ndarray


def encode(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[Encoded]:
    """Yields the chunks of documents with their tokens, in order."""
    running: deque[tuple[list[Chunk], Future]] = deque()
    with ThreadPoolExecutor(1, "tokenizer") as pool:
        for batch in _batches(documents, tokenizer):
            texts = [chunk.text for chunk in batch]
            running.append((batch, pool.submit(tokenizer.encode_chunks, texts)))
            if len(running) > 1:
                yield from _encoded(*running.popleft())
        while running:
            yield from _encoded(*running.popleft())


def _encoded(batch: list[Chunk], ids: Future) -> Iterator[Encoded]:
    for chunk, own in zip(batch, ids.result(), strict=True):
        yield Encoded(chunk.name, chunk.text, np.asarray(own, np.int32))


def _batches(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[list[Chunk]]:
    batch: list[Chunk] = []
    size = 0
    for chunk in _chunks(documents, tokenizer):
        batch.append(chunk)
        size += len(chunk.text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _chunks(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[Chunk]:
    for document in documents:
        name: str | None = document.name
        for text in filter(None, tokenizer.cut(document.chunks)):
            yield Chunk(name, text)
            name = None
        if name is not None:
            yield Chunk(name, "")


class Counter:
    """Counts the UTF-8 bytes, code points and words (as by `str.split`) of a document in chunks."""

    def __init__(self) -> None:
        self.bytes = self.characters = self.words = 0
        # If the previous chunk ended inside of a word, the rest of the word must not count again.
        self._in_word = False

    def add(self, text: str, data: bytes) -> None:
        """Takes the next chunk: its text, and the text in UTF-8."""
        if not text:
            return
        self.bytes += len(data)
        self.characters += len(text)
        self.words += count_words(text, data) - (self._in_word and not text[0].isspace())
        self._in_word = not text[-1].isspace()


def count_words(text: str, data: bytes) -> int:
    """Returns `len(text.split())`; computing it from the text's UTF-8 bytes `data` is faster."""
    if len(text) < len(data) and _WIDE_SPACE.search(text):
        return len(text.split())
    marked = data.translate(_WORD_TABLE)
    return marked.count(b" x") + marked.startswith(b"x")
