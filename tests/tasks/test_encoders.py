"""Tests settings that runs of encoder tasks derive from their data, and refusals."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_settings import changed

from brt.config import Attention, Config, Encoder, Questions, Sentences, Speech, Training
from brt.errors import ConfigError
from brt.training.run import prepare
from brt.training.saved_model import check_resumable


@pytest.fixture
def make(tmp_path: Path) -> Any:
    """Returns a function that returns the config of a run on generated data of a task."""

    def config(task: str) -> Config:
        generated = {"train": ("generated:r/7",), "test": (), "cache_dir": str(tmp_path)}
        return Config(
            training=Training(task=task, batch_size=3, epochs=2.0),
            encoder=Encoder(positions="sinusoidal" if task == "speech_recognition" else "learned"),
            sentences=Sentences(**generated, validation=(), max_length=512),
            questions=Questions(**generated, validation=(), max_length=512),
            speech=Speech(**generated, validation=("generated:q/2",), stack=3),
        )

    return config


def test_labels_vocabulary_and_steps_come_from_the_data(make: Any) -> None:
    sentences = make("text_classification")
    found, dataset, reader = prepare(sentences, progress=False)
    assert found.sentences.labels == dataset.labels == ("animal", "plant", "stone")
    assert (found.encoder.classes, found.encoder.vocab_size) == (3, 259)
    assert found.training.steps == 6 and reader[0].tokens.shape == (3, 512)
    largest = reader.largest()
    assert reader.positions(largest) == 3 * 512 and not largest.scored.any()
    again, *_ = prepare(found, progress=False)
    assert again == found, "what is written out describes the same run"
    ordered = changed(found, sentences={"labels": ("stone", "plant", "animal")})
    with pytest.raises(ConfigError, match="this workdir holds another run: Sentences.labels was"):
        check_resumable(found, ordered)


def test_numbers_are_one_class(make: Any, tmp_path: Path) -> None:
    (tmp_path / "t.tsv").write_text("sentence\tlabel\na\t1.5\nb\t2.5\n")
    numbers = changed(make("text_regression"), sentences={"train": (str(tmp_path / "t.tsv"),)})
    found, _, reader = prepare(numbers, progress=False)
    assert (found.encoder.classes, found.sentences.labels) == (1, ())
    assert reader.largest().targets.dtype == reader[0].targets.dtype == np.float32
    assert prepare(found, progress=False)[0] == found


def test_windows_are_what_an_epoch_of_questions_reads(make: Any) -> None:
    questions = make("extractive_qa")
    found, dataset, reader = prepare(questions, progress=False)
    windows = len(dataset.split("train"))
    assert found.training.steps == 2 * -(-windows // 3)
    assert reader[0].targets.shape == (3, 2) and found.encoder.vocab_size == 259
    free = changed(questions, questions={"max_answer_length": 5})
    assert len(check_resumable(questions, free)) == 1


def test_width_vocabulary_and_steps_come_from_the_speech(make: Any) -> None:
    found, dataset, reader = prepare(make("speech_recognition"), progress=False)
    assert found.encoder.features == 60 and found.training.steps == 6
    assert found.encoder.vocab_size == dataset.tokenizer.vocab_size
    largest = reader.largest()
    assert largest.features.shape == (3, int(dataset.split("train").lengths.max()), 60)
    assert reader.positions(largest) == largest.valid.size
    assert np.isclose(reader.epoch(6), 2)


def test_what_may_change_between_a_checkpoint_and_its_use(make: Any) -> None:
    config = make("speech_recognition")
    free = changed(
        config, speech={"beams": 8, "time_masks": (3, 20), "test": ("generated:z/1",)},
        attention={"kind": "clustered", "clusters": 3},
    )  # fmt: skip
    assert len(check_resumable(config, free)) == 5
    for values in ({"stack": 2}, {"unit": "words"}, {"mel_bands": 80}):
        with pytest.raises(ConfigError, match="this workdir holds another run"):
            check_resumable(config, changed(config, speech=values))


def test_numbers_that_no_utterance_reaches_are_refused(make: Any) -> None:
    """The limit is the number of frames of the longest utterance.

    Shorter utterances use fewer clusters.
    """
    config = make("speech_recognition")
    longest = max(s.lengths.max() for s in prepare(config, progress=False)[1].splits.values())
    for name in ("clusters", "top_k"):
        values = {"clusters": 3, "top_k": 3, "kind": "improved_clustered"}
        prepare(changed(config, attention={**values, name: int(longest)}), progress=False)
        message = f"Attention.{name} = {longest + 1} is above the {longest} frames of the longest"
        with pytest.raises(ConfigError, match=message):
            more = changed(config, attention={**values, name: int(longest) + 1})
            prepare(more, progress=False)


MASKED, SPEECH, QUESTIONS = "masked_language_modeling", "speech_recognition", "extractive_qa"


@pytest.mark.parametrize(
    ("task", "changes", "message"),
    [
        ("text_classification", {"encoder": {"features": 3}},
         "reads vectors of width 3, but Training.task ="),
        ("text_classification", {"encoder": {"max_positions": 64}},
         "Data.max_length = 512 is above Model.max_positions = 64"),
        ("text_classification", {"encoder": {"classes": 4}},
         "the model has 4 classes, but Data.train has 3 labels"),
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
        (QUESTIONS, {"training": {"label_smoothing": 0.1}},
         "label_smoothing = 0.1 has no effect on"),
        (QUESTIONS, {"encoder": {"max_positions": 64}}, "Data.max_length = 512 is above"),
        (QUESTIONS, {"attention": {"kind": "clustered", "clusters": 600}},
         "Attention.clusters = 600 is above Data.max_length = 512"),
        (QUESTIONS, {"attention": Attention(kind="shared_full")},
         "set Encoder.shared_queries_keys = True"),
        (QUESTIONS, {"questions": {"max_length": 44, "stride": 30, "max_question_length": 16}},
         r"Data.max_length = 44 must be above Questions.stride \+ .* = 50"),
        (QUESTIONS, {"questions": {"buckets": (20, 40)}},
         r"the last of Data.buckets = \(20, 40\) must be .* = 512"),
        (QUESTIONS, {"questions": {"train": ()}}, "Data.train names no source"),
        (QUESTIONS, {"questions": {"max_answer_length": 0}},
         "Questions.max_answer_length = 0 must be above 0"),
        (MASKED, {"encoder": {"features": 3}}, "reads vectors of width 3, but Training.task ="),
        (MASKED, {"training": {"segment_length": 20}, "encoder": {"max_positions": 19}},
         "Training.segment_length = 20 is above Model.max_positions = 19"),
        (MASKED, {"training": {"segment_length": 20}, "encoder": {"max_positions": 20},
                  "evaluation": {"segment_length": 21}},
         "Evaluation.segment_length = 21 is above Model.max_positions = 20"),
        (SPEECH, {"encoder": {"features": 20}},
         "have 60 features, but the model reads 20; it reads no others"),
        (SPEECH, {"encoder": {"vocab_size": 4}},
         "Model.vocab_size = 4 is too small for the .*characters of the tran"),
        (SPEECH, {"encoder": {"positions": "learned", "max_positions": 40}},
         "Model.max_positions = 40 is below"),
        (SPEECH, {"training": {"label_smoothing": 0.1}},
         "Training.label_smoothing = 0.1 has no effect on C"),
        (SPEECH, {"speech": {"train": ()}}, "Data.train names no source"),
        (SPEECH, {"speech": {"buckets": (80, 40)}}, r"Data.buckets = \(80, 40\) must ascend"),
        (SPEECH, {"speech": {"stack": 0}}, "Speech.stack = 0 must be above 0"),
        (SPEECH, {"speech": {"time_masks": (-1, 20)}}, "must be the number of masks"),
    ],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(
    make: Any, task: str, changes: dict[str, Any], message: str
) -> None:
    config = make(task)
    with pytest.raises(ConfigError, match=message):
        prepare(changed(config, **changes), progress=False)
