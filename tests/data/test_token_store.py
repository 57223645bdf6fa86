"""Tests that documents are encoded completely and in order, counted, and stored."""

import json
from random import Random

import numpy as np
import pytest

from brt.data import token_store, tokenizers
from brt.data.documents import Document
from brt.data.token_store import TokenStore
from brt.errors import DataError

TEXTS = ["One  two\nthree", "é 日本", "x", " word" * 1000]
BYTES = tokenizers.load("bytes")


def write(directory, texts=TEXTS, size=10**9, **settings):
    """Writes the texts to a token store in chunks of `size` characters."""
    found = (
        Document(f"text {i}", iter([text[j : j + size] for j in range(0, len(text), size)]))
        for i, text in enumerate(texts)
    )
    return token_store.write(directory, found, BYTES, **settings)


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_a_store_holds_the_documents_and_their_counts(tmp_path, size):
    store = write(tmp_path / "s", size=size)
    assert [bytes(store.document(i)).decode() for i in range(len(store))] == TEXTS
    assert store.bytes.tolist() == [len(text.encode()) for text in TEXTS]
    assert store.characters.tolist() == [len(text) for text in TEXTS]
    assert store.words.tolist() == [len(text.split()) for text in TEXTS]
    assert store.lengths.tolist() == store.bytes.tolist()
    assert store.names == tuple(f"text {i}" for i in range(4))
    assert (store.vocab_size, store.bos_id, store.manifest["tokens"]) == (256, 0, store.tokens.size)


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(256, "u1"), (257, "<u2"), (65536, "<u2"), (65537, "<u4")]
)
def test_ids_take_as_few_bytes_as_the_vocabulary_needs(tmp_path, vocab_size, dtype):
    class Tokenizer(tokenizers.ByteTokenizer):
        def encode(self, text):
            return np.array([0, self.vocab_size - 1], np.int32)

    tokenizer = Tokenizer()
    tokenizer.vocab_size = vocab_size
    store = token_store.write(tmp_path / "s", [Document("a", iter(["text"]))], tokenizer)
    assert store.tokens.dtype == np.dtype(dtype)
    assert store.tokens[:].tolist() == [0, vocab_size - 1]


def test_the_same_documents_make_the_same_store(tmp_path):
    sizes = []
    first, second = write(tmp_path / "a", progress=sizes.append), write(tmp_path / "b", size=2)
    assert sizes == [len(text.encode()) for text in TEXTS]
    assert first.manifest == second.manifest
    assert write(tmp_path / "c", TEXTS[:3]).fingerprint != first.fingerprint
    # The same tokens, but divided into other documents.
    assert write(tmp_path / "d", [*TEXTS[:2], "x" + TEXTS[3]]).fingerprint != first.fingerprint


def test_a_failure_leaves_no_store_that_can_be_opened(tmp_path):
    class Broken(tokenizers.ByteTokenizer):
        def encode(self, text):
            raise DataError("cannot encode")

    def unreadable():
        yield "text"
        raise DataError("cannot read")

    for name, documents, tokenizer, message in (
        ("bad", [Document("a", unreadable())], BYTES, "cannot read"),
        ("worse", [Document("a", iter("a"))], Broken(), "cannot encode"),
        ("none", [], BYTES, "there is no document for none"),
    ):
        with pytest.raises(DataError, match=message):
            token_store.write(tmp_path / name, documents, tokenizer)
        with pytest.raises(DataError, match="holds no finished preparation"):
            TokenStore.open(tmp_path / name)
    with pytest.raises(DataError, match="bad is not empty; name another directory"):
        write(tmp_path / "bad")


def test_a_store_that_is_not_whole_is_refused(tmp_path):
    write(tmp_path / "s")
    manifest = tmp_path / "s" / "manifest.json"
    good = manifest.read_text()

    def refused(message):
        with pytest.raises(DataError, match=message):
            TokenStore.open(tmp_path / "s")

    manifest.write_text(json.dumps({**json.loads(good), "format": 99}))
    refused(r"manifest\.json has format 99, this brt reads 1; prepare .*s again")
    manifest.write_text("[1]")
    refused("is damaged .it is .1., which is no dict.; delete")
    manifest.write_text(good[:50])
    refused(r"manifest\.json is damaged")
    manifest.unlink()
    refused(r"s holds no finished preparation \(manifest.json is missing\)")
    manifest.write_text(good)
    tokens = (tmp_path / "s" / "tokens.bin").read_bytes()
    (tmp_path / "s" / "tokens.bin").write_bytes(tokens[:-1])
    refused(r"s is damaged \(tokens\.bin has another size than its rows\)")
    (tmp_path / "s" / "tokens.bin").write_bytes(tokens)
    (tmp_path / "s" / "rows.npz").write_bytes(b"PK broken")
    refused("s is damaged .*; delete it and prepare it again")


SPACES = [c for c in map(chr, range(0x110000)) if c.isspace()]
MIXED = ["", "a b", "One line\n" * 900, "", "é", "x" * 9000]


@pytest.mark.parametrize("seed", range(3))
def test_words_are_those_of_split(seed: int) -> None:
    random = Random(seed)
    for _ in range(200):
        alphabet = [*random.sample(SPACES, 3), "a", "é", "日", "\U0001f600", "\x1b", "\u200b"]
        text = "".join(random.choices(alphabet[random.randrange(4) :], k=random.randrange(12)))
        check_counts(text)


def check_counts(text: str) -> None:
    assert token_store.count_words(text, text.encode()) == len(text.split())
    counter = token_store.Counter("a", BYTES)
    for character in text:
        counter.add(character, BYTES.encode(character))
    sizes = counter.bytes, counter.characters, counter.words
    assert sizes == (len(text.encode()), len(text), len(text.split()))


@pytest.mark.parametrize("batch", [1, 5000, 1 << 19])
def test_all_documents_are_encoded_in_order(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_store, "BATCH", batch)
    documents = (Document(str(i), iter([text])) for i, text in enumerate(MIXED))
    found: dict[str, list[token_store.Chunk]] = {}
    for chunk in token_store.encode(documents, tokenizers.load("bytes")):
        if chunk.name is not None:
            chunks = found[chunk.name] = []
        chunks.append(chunk)
    assert ["".join(chunk.text for chunk in own) for own in found.values()] == MIXED
    for own in found.values():
        for chunk in own:
            assert chunk.ids.dtype == np.int32 and bytes(chunk.ids.tolist()) == chunk.text.encode()
