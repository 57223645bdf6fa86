import random
import re

import numpy as np
import pytest
import sentencepiece

from brt.data import sources, tokenizer_files, tokenizer_training, tokenizers
from brt.errors import ConfigError, DataError

NOVEL = sources.CORPORA / "novels/train/robert-louis-stevenson-treasure-island.txt"
ODD = (
    "a\tb\r\nc  d   \n\n\n \x00 x\u2581y\u2581\u2581 \u2585 \u2047 é 日本 \U0001f600 <0x0A> <s> "
    "<unk> </s> \ufeff\u200b\u00a0 end  "
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "novel.model"
    tokenizer_training.train_sentencepiece([[NOVEL.read_text(encoding="utf-8")]], 600, path)
    return path


@pytest.fixture(params=["bytes", "sentencepiece"])
def tokenizer(request, model):
    return tokenizers.load("bytes" if request.param == "bytes" else str(model))


def in_parts(text, seed):
    """Yields the text in chunks of random sizes."""
    rng = random.Random(seed)
    while text:
        size = rng.choice([1, 2, 10, 1000, 100_000])
        yield text[:size]
        text = text[size:]


@pytest.mark.parametrize("text", ["", "\n", " ", ODD, ODD * 300, "long" * 5000, "\n" * 9000])
def test_text_comes_back_exactly(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32 and (len(ids) > 0) == bool(text)
    assert tokenizers.decode(tokenizer, ids) == text


def test_a_novel_comes_back_exactly(tokenizer):
    text = NOVEL.read_text(encoding="utf-8")
    assert tokenizers.decode(tokenizer, tokenizer.encode(text)) == text


@pytest.mark.parametrize("seed", range(4))
def test_tokens_do_not_depend_on_how_the_text_arrives(tokenizer, seed):
    text = NOVEL.read_text(encoding="utf-8")[:60_000] + "x" * 9000 + ODD
    parts = np.concatenate([*tokenizer.encode_chunks([*tokenizer.cut(in_parts(text, seed))])])
    np.testing.assert_array_equal(parts, tokenizer.encode(text))


def test_chunks_end_where_pieces_do(model):
    """Cutting text at whitespace costs no tokens: sentencepiece on the whole text agrees."""
    text = NOVEL.read_text(encoding="utf-8")[:100_000]
    whole = sentencepiece.SentencePieceProcessor(model_file=str(model)).encode(text)
    assert tokenizers.load(str(model)).encode(text).tolist() == whole


@pytest.mark.parametrize("size", [1, 5, 16])
def test_cut_keeps_all_text_and_the_size(size):
    text = "one two   three\n\nfour-and-a-very-long-word \n  five"
    for seed in range(20):
        found = [*tokenizers.cut(in_parts(text, seed), size)]
        assert "".join(found) == text
        assert all(0 < len(chunk) <= size for chunk in found)
        assert found == [*tokenizers.cut([text], size)]


def test_cut_prefers_newlines_then_spaces():
    assert [*tokenizers.cut(["one two\nthree four five"], 10)] == [
        "one two\n",
        "three",
        " four five",
    ]


def test_streamed_decoding_equals_decoding(tokenizer):
    decoder = tokenizers.StreamDecoder(tokenizer)
    pieces = [decoder.decode([i]) for i in tokenizer.encode(ODD)]
    assert "".join(pieces) + decoder.decode([], final=True) == ODD
    assert "\ufffd" not in "".join(pieces)


def test_bytes_that_are_no_text_are_shown_as_such():
    tokenizer = tokenizers.load("bytes")
    assert tokenizers.decode(tokenizer, [0xE6, 0x97, 65]) == "\ufffdA"
    decoder = tokenizers.StreamDecoder(tokenizer)
    assert decoder.decode([0xE6]) + decoder.decode([0x97]) == ""
    assert decoder.decode([], final=True) == "\ufffd"


def test_bos_is_never_a_target(tokenizer):
    text = NOVEL.read_text(encoding="utf-8")
    assert tokenizer.bos_id not in tokenizer.encode(text)
    assert 0 <= tokenizer.bos_id < tokenizer.vocab_size
    assert tokenizers.decode(tokenizer, [tokenizer.bos_id]) in ("", "\x00")


def test_models_that_normalise_do_so_once_per_document(tmp_path):
    """A dummy prefix or stripped spaces in every chunk would change the text."""
    path = tmp_path / "plain.model"
    text = NOVEL.read_text(encoding="utf-8")
    with open(path, "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(text.splitlines()), model_writer=file, vocab_size=500,
            pad_id=3, bos_id=-1, minloglevel=2,
        )  # fmt: skip
    tokenizer = tokenizers.load(str(path))
    line = " ".join(re.findall("[a-z]+", text))[:20_000]
    assert tokenizers.decode(tokenizer, tokenizer.encode(line)) == line
    assert tokenizer.bos_id == 3  # Like T5, the tokenizer uses the padding token as BOS.


def test_what_is_no_tokenizer_is_refused(tmp_path, model, monkeypatch):
    for content in (b"", b"this is no model", model.read_bytes()[:-1000]):
        (tmp_path / "bad.model").write_bytes(content)
        with pytest.raises(DataError, match=r"bad\.model is not a sentencepiece model"):
            tokenizers.load(str(tmp_path / "bad.model"))
    with pytest.raises(DataError, match=r"no\.model cannot be read: No such file"):
        tokenizers.load(str(tmp_path / "no.model"))
    with pytest.raises(ConfigError, match="Data.tokenizer = 'byte' is none of 'bytes', 'path"):
        tokenizers.load("byte")
    monkeypatch.setattr(tokenizer_files, "MAX_BYTES", 1 << 10)
    with pytest.raises(DataError, match=r"novel\.model cannot be read: it has .* bytes, more than"):
        tokenizers.load(str(model))


def test_a_model_without_bos_is_refused(tmp_path):
    with open(tmp_path / "a.model", "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["a b c d e f"]), model_writer=file, vocab_size=8,
            bos_id=-1, eos_id=-1, minloglevel=2, hard_vocab_limit=False,
        )  # fmt: skip
    with pytest.raises(DataError, match=r"a\.model has no BOS piece"):
        tokenizers.load(str(tmp_path / "a.model"))


def test_training_sees_long_lines_whole(tmp_path):
    """sentencepiece drops lines above 4192 bytes; here one such line contains all words."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=7)) for _ in range(30)]
    text = " ".join(rng.choices(words, k=20_000))
    path = tmp_path / "a.model"
    coverage = tokenizer_training.train_sentencepiece([[text]], 500, path)
    assert coverage == (len(text), len(text)) and coverage.fraction == 1
    assert len(tokenizers.load(str(path)).encode(text)) < 50_000  # The text has 160,000 characters.


def test_training_is_deterministic_and_samples_above_its_bound(tmp_path):
    text = NOVEL.read_text(encoding="utf-8")
    models = {}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        path = tmp_path / name
        coverage = tokenizer_training.train_sentencepiece(
            [[text]], 500, path, seed=seed, max_bytes=100_000
        )
        models[name] = path.read_bytes()
        assert coverage.total == len(text.encode())
        assert 40_000 < coverage.seen <= 100_000
    assert models["a"] == models["b"] != models["c"]


def test_vocabularies_that_do_not_fit_are_refused(tmp_path):
    def train(text, size):
        tokenizer_training.train_sentencepiece([[text]], size, tmp_path / "a.model")

    with pytest.raises(DataError, match=r"'train:32000' asks for more pieces .* use train:\d+ or"):
        train("hello world\n", 32000)
    with pytest.raises(
        DataError, match=r"'train:100' is too small .* use at least train:\d+$"
    ) as e:
        train("hello world\n", 100)
    with pytest.raises(DataError, match="there is no text to train a tokenizer on"):
        train("", 300)
    train("hello world\n", int(re.search(r"train:(\d+)$", str(e.value))[1]))


def test_more_pieces_than_there_are_bytes_are_refused_at_once(tmp_path):
    """The size is refused before sentencepiece trains for minutes without possible interruption."""
    with pytest.raises(
        DataError, match=r"'train:999999999' asks for more .* use train:272 or less"
    ):
        tokenizer_training.train_sentencepiece([["hello world\n"]], 999_999_999, tmp_path / "a")


@pytest.mark.parametrize(
    "text", ["train:", "train:-1", "train:0", "train:1e3", "train:٣", "train:1" + "0" * 5000]
)
def test_a_size_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match="Data.tokenizer = 'train:.*' must name a size"):
        tokenizer_training.vocabulary_size(text)


def test_only_the_name_of_a_tokenizer_to_train_has_a_vocabulary_size():
    assert tokenizer_training.vocabulary_size("train:32000") == 32000
    assert tokenizer_training.vocabulary_size("bytes") is None
