"""Tests the errors of a loaded model whose task does not support a call."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from brt import api
from brt.config import Config, Training
from brt.data.text_tokenizers import Encoding, TextTokenizer
from brt.errors import ConfigError
from brt.tasks.writers import WriteOptions, Writer
from brt.training.saved_model import SavedModel
from brt.training.workdir import Workdir


def model(task: str) -> api.Model:
    config = Config(training=Training(task=task))
    return api.Model(SavedModel(Workdir(Path("run")), 1, config, {}, {}))


def test_a_summary_in_the_making_has_no_memory() -> None:
    class Summarizer(Writer):
        def __call__(self, prompt: str, options: WriteOptions) -> Iterator[str]:
            yield prompt

    summarizer = model("summarization")
    summarizer._writer = Summarizer()
    with pytest.raises(ConfigError, match="trains a model without a memory; use a language"):
        _ = summarizer.stream("a document").memory


def test_a_classifier_predicts_no_text() -> None:
    def encode_texts(texts: list[str]) -> list[Encoding]:
        return [Encoding(np.arange(len(t)), np.zeros((len(t), 2), np.int32)) for t in texts]

    classifier = model("text_classification")
    classifier.tokenizer = TextTokenizer(
        name="t", fingerprint="f", file=("t", b""), vocab_size=300, begin=(1,), between=(2,),
        end=(2,), pad_id=0, encode_texts=encode_texts, decode_ids=str,
    )  # fmt: skip
    for bits in (classifier.token_bits, classifier.bits_per_byte):
        with pytest.raises(ConfigError, match="trains a model that predicts no text by itself"):
            bits("a sentence")
