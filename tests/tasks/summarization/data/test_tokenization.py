import json

import numpy as np
import pytest
import sentencepiece
import tokenizers

from brt import config
from brt.data import tokenizer_training
from brt.errors import ConfigError, DataError
from brt.tasks.summarization import tokenization
from brt.tasks.summarization.preparation import Encoder

TEXT = "  The  captain said: fifteen men\non a chest, Jim\u2026 "


def test_t5_ids_are_those_of_its_makers(t5_model, lines):
    oracle = sentencepiece.SentencePieceProcessor(model_file=str(t5_model))
    found = tokenization.load(str(t5_model))
    texts = [TEXT, *lines[:50], " ".join(lines), ""]
    for text, ids in zip(texts, found.encode(texts), strict=True):
        assert ids.dtype == np.int32
        assert ids.tolist() == oracle.encode(text)
    assert (found.pad_id, found.eos_id, found.decoder_start_id, found.begin) == (0, 1, 0, ())
    assert found.vocab_size == oracle.vocab_size()


@pytest.mark.parametrize(
    ("name", "special"), [("bart_json", (1, 2, 2, (0,))), ("t5_json", (0, 1, 0, ()))]
)
def test_json_ids_are_those_of_the_library(request, lines, name, special):
    path = request.getfixturevalue(name)
    oracle = tokenizers.Tokenizer.from_file(str(path))
    oracle.no_truncation()
    oracle.no_padding()
    found = tokenization.load(str(path))
    texts = [TEXT, *lines[:50], " ".join(lines)]
    for text, ids in zip(texts, found.encode(texts), strict=True):
        assert [*found.begin, *ids, found.eos_id] == oracle.encode(text).ids
    assert (found.pad_id, found.eos_id, found.decoder_start_id, found.begin) == special
    assert found.vocab_size == oracle.get_vocab_size()


def test_special_ids_are_not_in_text(tokenizer, lines):
    """A document may contain the text of special tokens: an end token in it would end it early."""
    for ids in tokenizer.encode([TEXT, "a </s> b <pad> c <s> d", *lines[:20]]):
        assert not {*ids.tolist()} & {tokenizer.pad_id, tokenizer.eos_id, *tokenizer.begin}
        assert (ids < tokenizer.vocab_size).all()


def test_text_comes_back(tokenizer, lines):
    for line in (" ".join(line.split()) for line in lines[:50]):
        ids = tokenizer.encode([line])[0].tolist()
        wrapped = [tokenizer.decoder_start_id, *tokenizer.begin, *ids, tokenizer.eos_id]
        beyond = [tokenizer.pad_id, tokenizer.vocab_size + 3]  # T5 models have additional ids.
        assert tokenizer.decode(np.array(wrapped + beyond)) == line


def test_a_trained_tokenizer_keeps_lines_and_odd_characters(trained_model):
    found = tokenization.load(str(trained_model))
    text = "One\n\n  two\tthree é 日本 \U0001f600\n"
    assert found.decode(found.encode([text])[0]) == text


def test_bad_tokenizers_are_named(tmp_path, bart_json, lines):
    def write(name, content):
        (tmp_path / name).write_bytes(content)
        return str(tmp_path / name)

    plain = json.loads(bart_json.read_text())
    plain["post_processor"] = None
    no_end = plain | {"added_tokens": [t for t in plain["added_tokens"] if t["content"] != "</s>"]}
    no_end["model"]["vocab"]["</t>"] = no_end["model"]["vocab"].pop("</s>")
    lm = tmp_path / "lm.model"
    tokenizer_training.train_sentencepiece([["\n".join(lines)]], 500, lm)
    for path, message in (
        (str(tmp_path / "no.json"), r"no\.json cannot be read: No such file"),
        (write("a.json", b"{}"), r"a\.json is not a tokenizer\.json"),
        (write("a.model", b"nothing"), r"a\.model is not a sentencepiece model"),
        (write("b.model", b""), r"b\.model is not a sentencepiece model"),
        (write("c.json", json.dumps(no_end).encode()), r"c\.json has no end token </s>"),
        (str(lm), r"lm\.model has no padding token <pad>; train one .*train:VOCAB_SIZE"),
    ):
        with pytest.raises(DataError, match=message):
            tokenization.load(path)
    with pytest.raises(ConfigError, match=r"Data\.tokenizer = 'bytes' is none of 'path/to/file"):
        tokenization.load("bytes")


def test_a_template_with_two_ends_is_refused(tmp_path, bart_json):
    made = tokenizers.Tokenizer.from_file(str(bart_json))
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s> <mask>", special_tokens=[("</s>", 2), ("<mask>", 4)]
    )
    made.save(str(tmp_path / "two.json"))
    with pytest.raises(DataError, match=r"two\.json ends a text with 2 ids, not with one"):
        tokenization.load(str(tmp_path / "two.json"))


def encoder(tokenizer, **settings):
    return Encoder(config.Pairs(**settings), tokenizer)


@pytest.mark.parametrize("limit", [3, 4, 17, 50, 1000])
def test_what_is_cut_keeps_its_begin_and_end(tokenizer, lines, limit):
    texts = [" ".join(lines[:n]) for n in (1, 3, 40)] + ["x"]
    found = encoder(tokenizer, max_source_length=limit, max_target_length=limit)
    for text, document, summary in zip(
        texts, found.sources(texts), found.targets(texts), strict=True
    ):
        ids = tokenizer.encode([text])[0].tolist()
        begin = list(tokenizer.begin)
        room = limit - len(begin) - 1
        for encoded in (document, summary):
            assert encoded.ids.tolist() == [*begin, *ids[:room], tokenizer.eos_id]
            assert encoded.ids.dtype == np.int32
            assert len(encoded.ids) <= limit
            assert encoded.uncut == len(begin) + len(ids) + 1


def test_the_prefix_stands_before_documents_only(tokenizer):
    found = encoder(tokenizer, prefix="summarize: ")
    with_prefix = tokenizer.encode(["summarize: a ship"])[0].tolist()
    ended = [*tokenizer.begin, *with_prefix, tokenizer.eos_id]
    assert found.sources(["a ship"])[0].ids.tolist() == ended
    assert len(found.targets(["a ship"])[0].ids) < len(ended)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_target_length": 2}, "max_target_length = 2 must be at least 3"),
        ({"buckets": (512, 256, 1024)}, r"buckets = \(512, 256, 1024\) must ascend"),
        ({"buckets": (0, 1024)}, "must ascend and be above 0"),
        ({"buckets": (256, 512)}, r"must be Pairs\.max_source_length = 1024"),
        ({"train": ()}, r"Data\.train names no source"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        config.Pairs(**settings)
