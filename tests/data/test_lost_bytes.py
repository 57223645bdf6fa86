"""Tests that bytes which a tokenizer cannot represent are counted, and that no metric per byte is
reported for such text.
"""

import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from brt import config
from brt.data import lost_bytes, preparation, token_store, tokenizers
from brt.data.documents import Document
from brt.data.token_store import TokenStore
from brt.errors import DataError
from brt.interop.huggingface.kept import byte_tokenizer
from brt.tasks.language_modeling.evaluation import text, text_metrics, xz_bits_per_byte
from brt.tasks.language_modeling.task import LanguageModeling
from brt.tasks.report import BITS_PER_BYTE, BITS_PER_TOKEN

ENGLISH = "the house on the hill was old and nobody knew who had built it when rain fell. "
CHINESE = "山上的老房子沒有人知道是誰建的。"


def model(path: Path, normalization: str) -> tokenizers.Tokenizer:
    """Trains a sentencepiece model without pieces for single bytes, like most such models."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([ENGLISH] * 20), model_writer=written, vocab_size=50,
        model_type="bpe", normalization_rule_name=normalization, hard_vocab_limit=False,
        minloglevel=2,
    )  # fmt: skip
    path.write_bytes(written.getvalue())
    return tokenizers.load(str(path))


@pytest.fixture(params=["identity", "nmt_nfkc"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> tokenizers.Tokenizer:
    return model(tmp_path / "a.model", request.param)


def write(place: Path, tokenizer: tokenizers.Tokenizer, *texts: str) -> TokenStore:
    documents = (Document(f"{i}", iter(text)) for i, text in enumerate(texts))
    return token_store.write(place, documents, tokenizer)


def test_lost_bytes_and_unknown_tokens_are_counted(
    tokenizer: tokenizers.Tokenizer, tmp_path: Path
) -> None:
    store = write(tmp_path / "s", tokenizer, ENGLISH, CHINESE, f"{ENGLISH}{CHINESE}")
    lost = store.lost.tolist()
    assert lost[0] == 0 and lost[1] == lost[2] == len(CHINESE.encode())
    assert store.manifest["lost_bytes"] == store.lost_bytes == sum(lost)
    assert store.manifest["unknown_tokens"] >= 2
    assert TokenStore.open(tmp_path / "s").lost_bytes == sum(lost)
    assert xz_bits_per_byte(store, tokenizer) is None


def test_a_normalizer_that_eats_newlines_loses_them(tmp_path: Path) -> None:
    eats = model(tmp_path / "a.model", "nmt_nfkc")
    assert lost_bytes.count(eats, "the\nhouse") == 1
    assert lost_bytes.count(eats, "the house") == 0


@pytest.mark.parametrize("name", ["bytes", "train:300"])
def test_what_keeps_every_byte_loses_none(name: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(f"{ENGLISH * 9}{CHINESE}\ufffd\r\n\u2581 ", newline="")
    data = config.Data(
        train=(str(tmp_path / "a.txt"),), tokenizer=name, validation_fraction=0.0,
        test_fraction=0.0, cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    dataset = preparation.prepare(data, progress=False)
    assert dataset.split("train").lost_bytes == 0
    assert "loses" not in preparation.summary(dataset)
    assert LanguageModeling().primary_metric(dataset) == BITS_PER_BYTE


def test_loss_is_told_and_training_is_measured_by_token(
    tokenizer: tokenizers.Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "a.txt").write_text(ENGLISH * 9)
    (tmp_path / "b.txt").write_text(CHINESE * 9)
    data = config.Data(
        train=(str(tmp_path / "a.txt"),), validation=(str(tmp_path / "b.txt"),),
        tokenizer=str(tmp_path / "a.model"), test_fraction=0.0, cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    dataset, task = preparation.prepare(data), LanguageModeling()
    size = len((CHINESE * 9).encode())
    assert f"loses {size} of {size} bytes" in capsys.readouterr().err
    assert f"validation: the tokenizer loses {size} of" in preparation.summary(dataset)
    assert task.primary_metric(dataset) == BITS_PER_TOKEN
    assert task.units_per_token(config.Config(), dataset) == 1
    assert task.baseline(config.Config(), dataset) is None


def test_figures_over_lost_text_are_absent() -> None:
    good, lost = text_metrics(10, 20, 20, 4, 7.0), text_metrics(10, 20, 20, 4, 7.0, 1)
    absent = {name for name in good if lost[name] is None}
    assert absent == {"bits_per_byte", "bits_per_character", "word_perplexity"}
    assert lost["bits_per_token"] == good["bits_per_token"] and lost["lost_bytes"] == 1
    protocol = {"window": 1, "segment_length": 1, "tokenizer": "a"}
    more = {"documents": 1, "tokens_per_second": None, "protocol": protocol}
    assert "loses 1 of 20 bytes" in text(lost | more)
    assert "loses" not in text(good | more)


def test_there_are_no_words_without_white_space() -> None:
    for words in (0, 1, 40):
        found = text_metrics(3760, 3760, 1280, words, 9000.0)
        assert found["word_perplexity"] is None and math.isfinite(found["bits_per_byte"])
    assert text_metrics(100, 100, 100, 20, 90.0)["word_perplexity"] == pytest.approx(math.exp(4.5))


def test_a_tokenizer_that_drops_all_text_is_refused(tmp_path: Path) -> None:
    level = byte_tokenizer()
    level["model"]["vocab"]["\u0100"] = 256
    level["added_tokens"][0]["content"] = "<s>"
    level["model"]["vocab"] |= {"<s>": level["model"]["vocab"].pop("<|bos|>")}
    (tmp_path / "tokenizer.json").write_text(json.dumps(level))
    kept = tokenizers.load(str(tmp_path / "tokenizer.json"))
    assert kept.decode_bytes(kept.encode(CHINESE)) == CHINESE.encode()
    level["post_processor"] = {
        "type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {},
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(level))
    with pytest.raises(DataError, match="drops all of a text; remove the part that drops it"):
        tokenizers.load(str(tmp_path / "tokenizer.json"))


def test_only_chunks_that_differ_count() -> None:
    counter = lost_bytes.LostBytes(tokenizers.ByteTokenizer())
    for part, lost in (ENGLISH, 0), (CHINESE, 3), (ENGLISH, 0):
        data = part.encode()
        counter.add(data, np.frombuffer(data, np.uint8)[: len(data) - lost])
    assert counter.lost == 3
