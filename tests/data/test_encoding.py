"""Tests that documents are encoded completely and in order, and that words are counted."""

from collections.abc import Iterator
from random import Random

import numpy as np
import pytest

from brt.data import token_store, tokenizers
from brt.data.documents import Document
from brt.errors import DataError

SPACES = [c for c in map(chr, range(0x110000)) if c.isspace()]
TEXTS = ["", "a b", "One line\n" * 900, "", "é", "x" * 9000]


@pytest.mark.parametrize("seed", range(3))
def test_words_are_those_of_split(seed: int) -> None:
    random = Random(seed)
    for _ in range(200):
        alphabet = [*random.sample(SPACES, 3), "a", "é", "日", "\U0001f600", "\x1b", "\u200b"]
        text = "".join(random.choices(alphabet[random.randrange(4) :], k=random.randrange(12)))
        check_counts(text)


def check_counts(text: str) -> None:
    assert token_store.count_words(text, text.encode()) == len(text.split())
    counter = token_store.Counter()
    for character in text:
        counter.add(character, character.encode())
    sizes = counter.bytes, counter.characters, counter.words
    assert sizes == (len(text.encode()), len(text), len(text.split()))


@pytest.mark.parametrize("batch", [1, 5000, 1 << 19])
def test_all_documents_are_encoded_in_order(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_store, "BATCH", batch)
    documents = (Document(str(i), iter([text])) for i, text in enumerate(TEXTS))
    found: dict[str, list[token_store.Encoded]] = {}
    for chunk in token_store.encode(documents, tokenizers.load("bytes")):
        if chunk.name is not None:
            chunks = found[chunk.name] = []
        chunks.append(chunk)
    assert ["".join(chunk.text for chunk in own) for own in found.values()] == TEXTS
    for own in found.values():
        for chunk in own:
            assert chunk.ids.dtype == np.int32 and bytes(chunk.ids.tolist()) == chunk.text.encode()


def test_errors_of_documents_and_tokenizers_are_raised() -> None:
    class Broken(tokenizers.ByteTokenizer):
        def encode(self, text: str) -> np.ndarray:
            raise DataError("cannot encode")

    def unreadable() -> Iterator[str]:
        yield "a"
        raise DataError("cannot read")

    for document, tokenizer, message in (
        (Document("a", iter("a")), Broken(), "cannot encode"),
        (Document("a", unreadable()), tokenizers.load("bytes"), "cannot read"),
    ):
        with pytest.raises(DataError, match=message):
            list(token_store.encode([document], tokenizer))
