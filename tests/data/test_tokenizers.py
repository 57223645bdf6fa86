import json
import random
import re

import numpy as np
import pytest
import sentencepiece
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from brt.config import Data
from brt.data import preparation, sources, tokenizer_files, tokenizer_training, tokenizers
from brt.errors import ConfigError, DataError

NOVEL = sources.CORPORA / "novels/train/robert-louis-stevenson-treasure-island.txt"
ODD = (
    "a\tb\r\nc  d   \n\n\n \x00 x\u2581y\u2581\u2581 \u2585 \u2047 é 日本 \U0001f600 <0x0A> <s> "
    "<unk> </s> <mask> \ufeff\u200b\u00a0 end  "
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "novel.model"
    tokenizer_training.train_sentencepiece([[NOVEL.read_text(encoding="utf-8")]], 600, path)
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Returns a tokenizer file like RoBERTa's: most special tokens have the first ids, and the
    mask token has the last id.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "<pad>", "</s>", "<unk>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator([NOVEL.read_text(encoding="utf-8")[:100_000]], trainer)
    tokenizer.add_special_tokens(["<mask>"])
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(params=["bytes", "model", "file"])
def tokenizer(request):
    name = request.param
    return tokenizers.load(name if name == "bytes" else str(request.getfixturevalue(name)))


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


def test_a_novel_comes_back_exactly_and_has_no_special_ids(tokenizer):
    text = NOVEL.read_text(encoding="utf-8")
    ids = tokenizer.encode(text)
    assert tokenizers.decode(tokenizer, ids) == text
    special = [tokenizer.bos_id, *tokenizer.special_ids.values()]
    assert not np.isin([*ids, *tokenizer.encode(ODD.replace("\0", ""))], special).any()
    assert 0 <= tokenizer.bos_id < tokenizer.vocab_size
    assert tokenizers.decode(tokenizer, [tokenizer.bos_id]) in ("", "\x00")


def test_models_that_normalise_do_so_once_per_document(tmp_path):
    """A dummy prefix or stripped spaces in every chunk would change the text."""
    path = tmp_path / "plain.model"
    text = NOVEL.read_text(encoding="utf-8")[:40_000]
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
    # This is refused before sentencepiece trains for minutes without possible interruption.
    with pytest.raises(DataError, match=r"'train:999999999' asks .* use train:272 or less"):
        train("hello world\n", 999_999_999)
    train("hello world\n", int(re.search(r"train:(\d+)$", str(e.value))[1]))


@pytest.mark.parametrize(
    "text", ["train:", "train:-1", "train:0", "train:1e3", "train:٣", "train:1" + "0" * 5000]
)
def test_a_size_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match="Data.tokenizer = 'train:.*' must name a size"):
        tokenizer_training.vocabulary_size(text)
    assert tokenizer_training.vocabulary_size("train:32000") == 32000
    assert tokenizer_training.vocabulary_size("bytes") is None


def test_tokens_of_a_file_are_the_librarys(file):
    library = Tokenizer.from_file(str(file))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    text = NOVEL.read_text(encoding="utf-8")[:3000]
    tokenizer = tokenizers.load(str(file))
    assert (tokenizer.vocab_size, tokenizer.bos_id) == (400, 0)  # without the mask token, id 400
    expected = library.encode(text, add_special_tokens=False).ids
    np.testing.assert_array_equal(tokenizer.encode(text), expected)
    assert tokenizer.decode_bytes([0, 2, 400]) == b""


def test_a_corpus_keeps_the_file(file, tmp_path):
    (tmp_path / "a.txt").write_text("a text of its own")
    data = Data(train=(f"{tmp_path}/a.txt",), validation=(), test=(), tokenizer=str(file),
                validation_fraction=0.0, test_fraction=0.0, cache_dir=str(tmp_path))  # fmt: skip
    dataset = preparation.prepare(data, progress=False)
    assert dataset.tokenizer.fingerprint == tokenizers.load(str(file)).fingerprint
    assert (dataset.directory / "tokenizer.json").read_bytes() == file.read_bytes()
    text = dataset.tokenizer.decode_bytes(dataset.split("train").document(0))
    assert text == b"a text of its own"


def changed(settings, **model):
    """Returns the tokenizer file as JSON with changed entries of its section "model"."""
    return json.dumps({**settings, "model": {**settings["model"], **model}})


def without(settings, piece, instead=None):
    """Returns the tokenizer file without a piece and its merges; `instead` takes over its id."""
    model = settings["model"]
    vocabulary = {found: i for found, i in model["vocab"].items() if found != piece}
    if instead:
        vocabulary[instead] = model["vocab"][piece]
    merges = [pair for pair in model["merges"] if piece not in (*pair, "".join(pair))]
    return changed(settings, vocab=vocabulary, merges=merges)


def greedy(settings):
    """Returns the tokenizer file with the added token " the", which absorbs spaces before it."""
    word = {"id": 401, "content": " the", "special": False, "lstrip": True, "rstrip": False,
            "single_word": False, "normalized": False}  # fmt: skip
    return json.dumps({**settings, "added_tokens": [*settings["added_tokens"], word]})


def test_added_words_are_text(file, tmp_path):
    other = Tokenizer.from_file(str(file))
    other.add_tokens(["  the"])
    other.save(str(tmp_path / "tokenizer.json"))
    tokenizer = tokenizers.load(str(tmp_path / "tokenizer.json"))
    ids = tokenizer.encode("of  the  sea")
    assert 401 in ids
    assert tokenizers.decode(tokenizer, ids) == "of  the  sea"


def test_files_that_lose_bytes_are_refused(file, tmp_path):
    settings = json.loads(file.read_bytes())
    other = Tokenizer.from_file(str(file))
    other.normalizer = normalizers.Lowercase()
    nameless = json.dumps({**settings, "post_processor": None}).replace("<s>", "<S>")
    for name, content, sentence in (
        ("broken", "{", "is not a tokenizer.json"),
        ("lower", other.to_str(), "does not keep every byte of a text; only byte-level BPE"),
        ("cut", json.dumps({**settings, "pre_tokenizer": None}), "does not keep every byte"),
        ("list", json.dumps({**settings, "normalizer": [[]]}), "is not a tokenizer.json"),
        ("no-newline", without(settings, "\u010a", "\u0109\u0109"), r"no piece is b'\n', nor 0"),
        ("hole", without(settings, "Ġt"), "are not 0 to 399"),
        ("strange", without(settings, "Ġt", "\u4e00"), "has '\u4e00', which stands for no byte"),
        ("dropout", changed(settings, dropout=0.1), ": it is BPE with dropout; only"),
        ("ends", changed(settings, end_of_word_suffix="w"), "BPE with end_of_word_suffix"),
        ("greedy", greedy(settings), ": ' the' removes the spaces next to it"),
        ("nameless", nameless, "has none of the pieces <|begin"),
    ):
        path = tmp_path / f"{name}.json"
        path.write_text(content)
        with pytest.raises(DataError) as caught:
            tokenizers.load(str(path))
        assert sentence in str(caught.value)


GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
STEPS = {
    "GPT-2": [pre_tokenizers.Split(Regex(GPT_2), "isolated")],
    "Llama 3": [pre_tokenizers.Split(Regex(LLAMA_3), "isolated")],
    "SmolLM2": [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.Split(Regex(GPT_2), "isolated"),
    ],
}


@pytest.mark.parametrize("family", STEPS)
def test_long_texts_have_the_ids_of_the_whole_text(family, tmp_path):
    """Lines end in spaces, and several newlines separate paragraphs."""
    library = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.pre_tokenizer = pre_tokenizers.Sequence([*STEPS[family], level])
    library.decoder = decoders.ByteLevel()
    library.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<s>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    lines = NOVEL.read_text(encoding="utf-8")[:60_000].splitlines()
    ends = "\n", "  \n", "\n\n\n", "\n    ", " 1999 \n\t", "\r\n\r\n"
    text = "".join(line + ends[i % len(ends)] for i, line in enumerate(lines))
    library.train_from_iterator([text], trainer)
    library.save(str(tmp_path / "tokenizer.json"))
    found = tokenizers.load(str(tmp_path / "tokenizer.json")).encode(text)
    expected = library.encode(text, add_special_tokens=False).ids
    np.testing.assert_array_equal(found, expected)
