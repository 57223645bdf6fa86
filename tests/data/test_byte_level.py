import json
import random

import numpy as np
import pytest
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
from brt.data import preparation, sources, tokenizers
from brt.errors import DataError

NOVEL = sources.CORPORA / "novels/train/robert-louis-stevenson-treasure-island.txt"
ODD = "a\tb\r\nc  d   \n\n\n \x00 x\u2581y é 日本 \U0001f600 <s> </s> <mask> \ufeff\u200b end  "
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Returns a tokenizer file like RoBERTa's: most special tokens have the first ids, and the
    mask token has the last id.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator([NOVEL.read_text(encoding="utf-8")[:100_000]], trainer)
    tokenizer.add_special_tokens(["<mask>"])
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_text_comes_back_exactly_and_has_no_special_ids(file):
    tokenizer = tokenizers.load(str(file))
    assert (tokenizer.vocab_size, tokenizer.bos_id) == (400, 0)  # without the mask token, id 400
    for text in ("", " ", ODD, ODD * 300, "x" * 9000, NOVEL.read_text(encoding="utf-8")[:50_000]):
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int32 and (len(ids) > 0) == bool(text)
        assert tokenizers.decode(tokenizer, ids) == text
        assert not np.isin(ids, [0, 1, 2, 3, 400]).any()
    assert tokenizer.decode_bytes([0, 2, 400]) == b""


def test_tokens_are_the_librarys_however_the_text_arrives(file):
    text, draw = NOVEL.read_text(encoding="utf-8")[:20_000] + ODD, random.Random(0)
    library = Tokenizer.from_file(str(file))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    short = text[:3000]
    expected = library.encode(short, add_special_tokens=False).ids
    tokenizer = tokenizers.load(str(file))
    np.testing.assert_array_equal(tokenizer.encode(short), expected)
    cuts = sorted(draw.sample(range(len(text)), 20))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]
    found = np.concatenate([*tokenizer.encode_chunks([*tokenizer.cut(iter(parts))])])
    np.testing.assert_array_equal(found, tokenizer.encode(text))


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
