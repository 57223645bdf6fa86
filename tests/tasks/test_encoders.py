"""Tests settings that runs on sentences and questions derive from their data, and refusals."""

import dataclasses
import shutil
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from brt import tasks
from brt.config import Attention, Config, Encoder, Questions, Sentences, Training
from brt.errors import ConfigError
from brt.interop.huggingface import convert
from brt.training import run as runs
from brt.training.run import prepare
from brt.training.saved_model import check_resumable
from brt.training.state import initial_params


@pytest.fixture
def sentences(tmp_path):
    return Config(
        training=Training(task="text_classification", batch_size=3, epochs=2.0),
        sentences=Sentences(
            train=("generated:r/7",), validation=(), test=(), max_length=512,
            cache_dir=str(tmp_path),
        ),
    )  # fmt: skip


@pytest.fixture
def questions(tmp_path):
    return Config(
        training=Training(task="extractive_qa", batch_size=3, epochs=2.0),
        questions=Questions(
            train=("generated:r/7",), validation=(), test=(), max_length=512,
            cache_dir=str(tmp_path),
        ),
    )  # fmt: skip


def changed(config, section, **values):
    """Returns the config with changed values in one section."""
    return dataclasses.replace(
        config, **{section: dataclasses.replace(getattr(config, section), **values)}
    )


def test_labels_vocabulary_and_steps_come_from_the_data(sentences):
    found, dataset, reader = prepare(sentences, progress=False)
    assert found.sentences.labels == dataset.labels == ("animal", "plant", "stone")
    assert (found.encoder.classes, found.encoder.vocab_size) == (3, 259)
    assert found.training.steps == 6 and reader[0].tokens.shape == (3, 512)
    largest = reader.largest()
    assert reader.positions(largest) == 3 * 512 and not largest.scored.any()
    again, *_ = prepare(found, progress=False)
    assert again == found, "what is written out describes the same run"
    ordered = changed(found, "sentences", labels=("stone", "plant", "animal"))
    with pytest.raises(ConfigError, match="this workdir holds another run: Sentences.labels was"):
        check_resumable(found, ordered)
    with pytest.raises(ConfigError, match="the model has 4 classes, but Data.train has 3 labels"):
        prepare(changed(sentences, "encoder", classes=4), progress=False)


def test_numbers_are_one_class(sentences, tmp_path):
    (tmp_path / "t.tsv").write_text("sentence\tlabel\na\t1.5\nb\t2.5\n")
    numbers = changed(sentences, "sentences", train=(str(tmp_path / "t.tsv"),))
    numbers = changed(numbers, "training", task="text_regression")
    found, _, reader = prepare(numbers, progress=False)
    assert (found.encoder.classes, found.sentences.labels) == (1, ())
    assert reader.largest().targets.dtype == reader[0].targets.dtype == np.float32
    assert prepare(found, progress=False)[0] == found


def test_windows_are_what_an_epoch_of_questions_reads(questions):
    found, dataset, reader = prepare(questions, progress=False)
    windows = len(dataset.split("train"))
    assert found.training.steps == 2 * -(-windows // 3)
    assert reader[0].targets.shape == (3, 2) and found.encoder.vocab_size == 259
    free = changed(questions, "questions", max_answer_length=5, no_answer_margin=1.0)
    assert len(check_resumable(questions, free)) == 2


@pytest.mark.parametrize(
    ("objective", "changes", "message"),
    [
        ("text_classification", {"encoder": {"features": 3}},
         "reads vectors of width 3, but Training.task ="),
        ("text_classification", {"encoder": {"max_positions": 64}},
         "Data.max_length = 512 is above Model.max_positions = 64"),
        ("text_classification", {"sentences": {"buckets": (64, 128)}},
         r"the last of Data.buckets = \(64, 128\) must be Data.max_length = 512"),
        ("text_classification", {"sentences": {"labels": ("a", "a")}}, "contains a label twice"),
        ("text_classification", {"sentences": {"columns": ("second=b",)}},
         "names a second sentence; name the first one"),
        ("text_classification", {"sentences": {"train": ()}}, "Data.train names no source"),
        ("text_regression", {"sentences": {"labels": ("a", "b")}},
         r"Sentences.labels = \('a', 'b'\) is for classes; regression reads numbers"),
        ("text_regression", {"training": {"label_smoothing": 0.1}},
         "label_smoothing = 0.1 has no effect on regression"),
        ("extractive_qa", {"training": {"label_smoothing": 0.1}},
         "label_smoothing = 0.1 has no effect on"),
        ("extractive_qa", {"encoder": {"max_positions": 64}},
         "Data.max_length = 512 is above"),
        ("extractive_qa", {"attention": {"kind": "clustered", "clusters": 600}},
         "Attention.clusters = 600 is above Data.max_length = 512"),
    ],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(sentences, questions, objective, changes, message):
    config = questions if objective == "extractive_qa" else sentences
    config = changed(config, "training", task=objective)
    with pytest.raises(ConfigError, match=message):
        for section, values in changes.items():
            config = changed(config, section, **values)
        prepare(config, progress=False)


def test_one_projection_for_kinds_that_have_one(questions):
    config = dataclasses.replace(questions, attention=Attention(kind="shared_full"))
    with pytest.raises(ConfigError, match="set Encoder.shared_queries_keys = True"):
        prepare(config, progress=False)
    assert dataclasses.replace(config, encoder=Encoder(shared_queries_keys=True))


def test_a_pretrained_encoder_gets_a_new_head_for_the_labels(sentences, tmp_path):
    source = Path(__file__).parents[1] / "data/huggingface/roberta"
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    shutil.copytree(source, theirs)
    # The vocabulary has as many tokens as the pretrained model.
    words = ["<s>", "<pad>", "</s>", "<unk>", *(f"w{i}" for i in range(60))]
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    made.save(str(theirs / "tokenizer.json"))
    list(convert.from_hf(theirs, ours, verified=False))
    rows = [f"w1 w2\tw3 x\t{label}\n" for label in ("no", "yes", "maybe")]
    (tmp_path / "pairs.tsv").write_text("sentence1\tsentence2\tlabel\n" + "".join(rows))
    config = changed(
        sentences, "sentences", train=(str(tmp_path / "pairs.tsv"),), max_length=32,
        tokenizer=str(ours / "tokenizer.json"),
    )  # fmt: skip
    config = changed(config, "training", init_from=str(ours))
    weights = runs.find_weights(config)
    found, dataset, reader = prepare(config, weights, progress=False)
    assert found.encoder.layers == 2 and found.encoder.classes == 3
    tokens = reader[0].tokens[0, :9].tolist()
    assert tokens == [0, 5, 6, 2, 2, 7, 3, 2, 0], "<s> w1 w2 </s></s> w3 <unk> </s>"
    initial = nn.meta.unbox(jax.eval_shape(lambda: initial_params(found)))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), initial)
    params, missing, unused = tasks.from_config(found).start(found, weights, zeros)
    assert missing and all(name.startswith("head/") for name in missing) and not unused
    body = jax.tree.leaves(params["encoder"])
    assert all(np.asarray(leaf).any() for leaf in body) and params["head"]["out"]["bias"].size == 3
    with pytest.raises(ConfigError, match="know 64 ids, but the tokenizer bytes makes that 259"):
        prepare(changed(config, "sentences", tokenizer="bytes"), weights, progress=False)
