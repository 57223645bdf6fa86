"""Tests tokenizers of texts, which tell the characters of each id and add special ids."""

import dataclasses

import numpy as np
import pytest
import tokenizers

from brt.data import text_tokenizers, tokenizer_training
from brt.errors import ConfigError, DataError

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]  # RoBERTa's first ids
TEXTS = [
    "It was the best of times, it was the worst of times.",
    "the best caf\u00e9 of all times",
] * 9
TEXT = "  The best caf\u00e9 \u65e5\u672c of </s> times,\nit was"


@pytest.fixture(scope="session")
def roberta_json(tmp_path_factory):
    """Returns a tokenizer file like RoBERTa's: byte-level BPE, pairs `<s> text </s></s> text </s>`,
    and padding to 64 tokens.
    """
    made = tokenizers.ByteLevelBPETokenizer(trim_offsets=True)
    made.train_from_iterator(TEXTS, 300, special_tokens=SPECIAL, show_progress=False)
    made.post_processor = tokenizers.processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    made.enable_padding(pad_id=1, pad_token="<pad>", length=64)
    path = tmp_path_factory.mktemp("roberta") / "tokenizer.json"
    made.save(str(path))
    return path


@pytest.fixture(scope="session")
def bert_json(tmp_path_factory):
    """Returns a tokenizer file like BERT's: `[CLS] text [SEP] text [SEP]`."""
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=120, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    made.train_from_iterator(TEXTS, trainer)
    made.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    path = tmp_path_factory.mktemp("bert") / "tokenizer.json"
    made.save(str(path))
    return path


@pytest.fixture(scope="session")
def trained_model(tmp_path_factory):
    """Returns the model that the setting "train:300" trains."""
    path = tmp_path_factory.mktemp("model") / "tokenizer.model"
    tokenizer_training.train_sentencepiece([TEXTS], 300, path, special=text_tokenizers.ROBERTA)
    return path


@pytest.fixture
def bytes_name():
    return "bytes"


@pytest.fixture(params=["bytes_name", "trained_model", "roberta_json", "bert_json"])
def tokenizer(request):
    return text_tokenizers.load(str(request.getfixturevalue(request.param)))


def test_spans_ascend_over_all_characters_but_spaces(tokenizer):
    ids, spans = tokenizer.encode([TEXT])[0]
    assert ids.dtype == np.int32 and len(ids) == len(spans)
    assert (spans[:, 0] <= spans[:, 1]).all() and (np.diff(spans[:, 1]) >= 0).all()
    covered = np.zeros(len(TEXT), bool)
    for start, stop in spans:
        covered[start:stop] = True
    assert all(TEXT[i].isspace() for i in np.flatnonzero(~covered))
    best = np.flatnonzero((spans[:, 0] < 10) & (spans[:, 1] > 6))
    assert TEXT[spans[best[0], 0] : spans[best[-1], 1]].strip() == "best"


def test_special_ids_are_only_around_texts(tokenizer):
    first, second = (spelt.ids for spelt in tokenizer.encode([TEXT, "it <s> [SEP] <pad>"]))
    special = {*tokenizer.begin, *tokenizer.between, *tokenizer.end, tokenizer.pad_id}
    assert not special & {*first.tolist(), *second.tolist()}
    alone, both = tokenizer.wrap(first), tokenizer.wrap(first, second)
    assert len(alone) - len(first) == tokenizer.special_count(1)
    assert len(both) - len(first) - len(second) == tokenizer.special_count(2)
    assert both[: len(tokenizer.begin)].tolist() == list(tokenizer.begin)
    assert (both < tokenizer.vocab_size).all()
    assert len({tokenizer.begin[0], tokenizer.end[0], tokenizer.pad_id}) == 3


def test_ids_become_their_texts_again(tokenizer):
    texts = ["the best of times", "it was"]
    ids = tokenizer.wrap(*(spelt.ids for spelt in tokenizer.encode(texts)))
    assert [text.strip().lower() for text in tokenizer.texts(ids)] == texts
    assert tokenizer.texts(tokenizer.wrap(ids[:0])) == []


@pytest.mark.parametrize("name", ["roberta_json", "bert_json"])
def test_a_pair_is_what_its_file_says(request, name):
    path = request.getfixturevalue(name)
    oracle = tokenizers.Tokenizer.from_file(str(path))
    oracle.no_padding()
    found = text_tokenizers.load(str(path))
    texts = ["the best of times", "it was"]
    assert found.wrap(*(s.ids for s in found.encode(texts))).tolist() == oracle.encode(*texts).ids
    assert found.wrap(found.encode(texts)[0].ids).tolist() == oracle.encode(texts[0]).ids
    assert found.vocab_size == oracle.get_vocab_size()


def test_a_copy_is_the_same(tokenizer, tmp_path):
    name, content = tokenizer.file
    (tmp_path / name).write_bytes(content)
    again = text_tokenizers.load(str(tmp_path / tokenizer.file[0]))
    names = ("fingerprint", "vocab_size", "begin", "between", "end", "pad_id")
    assert all(getattr(again, name) == getattr(tokenizer, name) for name in names)
    np.testing.assert_array_equal(again.encode([TEXT])[0].ids, tokenizer.encode([TEXT])[0].ids)


def test_what_a_file_lacks_gets_ids_behind_its_own(trained_model):
    of_bytes = text_tokenizers.load("bytes")
    assert (of_bytes.begin, of_bytes.between, of_bytes.end) == ((256,), (257, 257), (257,))
    assert of_bytes.encode(["\u00e9a"])[0].spans.tolist() == [[0, 1], [0, 1], [1, 2]]
    trained = text_tokenizers.load(str(trained_model))
    assert (trained.begin, trained.end, trained.pad_id) == ((0,), (2,), 1)
    assert trained.vocab_size == 300 and dataclasses.is_dataclass(trained)


def test_other_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"Data.tokenizer = 'x.txt' is none of 'bytes', 'p"):
        text_tokenizers.load("x.txt")
    for ending, what in (("json", "tokenizer.json"), ("model", "sentencepiece model")):
        path = tmp_path / f"bad.{ending}"
        path.write_text("{}")
        with pytest.raises(DataError, match=f"{path} is not a {what}"):
            text_tokenizers.load(str(path))
