"""Tests what a speech run derives from its data, and what it refuses."""

import dataclasses

import numpy as np
import pytest

from brt.config import Config, Encoder, Speech, Training
from brt.errors import ConfigError
from brt.training.run import prepare
from brt.training.saved_model import check_resumable


@pytest.fixture
def config(tmp_path):
    return Config(
        training=Training(task="speech_recognition", batch_size=3, epochs=2.0),
        encoder=Encoder(positions="sinusoidal"),
        speech=Speech(
            train=("generated:r/7",), validation=("generated:q/2",), test=(), stack=3, stride=3,
            cache_dir=str(tmp_path),
        ),
    )  # fmt: skip


def changed(config, section, **values):
    """Returns the config with changed values in one section."""
    return dataclasses.replace(
        config, **{section: dataclasses.replace(getattr(config, section), **values)}
    )


def test_width_vocabulary_and_steps_come_from_the_data(config):
    found, dataset, reader = prepare(config, progress=False)
    assert found.encoder.features == 60 and found.training.steps == 6
    assert found.encoder.vocab_size == dataset.tokenizer.vocab_size
    largest = reader.largest()
    assert largest.features.shape == (3, int(dataset.split("train").lengths.max()), 60)
    assert reader.positions(largest) == largest.valid.size
    assert np.isclose(reader.epoch(6), 2)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"features": 20}, "have 60 features, but the model reads 20; it reads no others"),
        ({"vocab_size": 4}, "Model.vocab_size = 4 is too small for the .*characters of the tran"),
        ({"positions": "learned", "max_positions": 40}, "Model.max_positions = 40 is below"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(config, values, message):
    with pytest.raises(ConfigError, match=message):
        prepare(changed(config, "encoder", **values), progress=False)


def test_numbers_that_no_utterance_reaches_are_refused(config):
    """The limit is the number of frames of the longest utterance.

    Shorter utterances use fewer clusters.
    """
    longest = max(s.lengths.max() for s in prepare(config, progress=False)[1].splits.values())
    for name in ("clusters", "top_k"):
        values = {"clusters": 3, "top_k": 3, "kind": "improved_clustered"}
        allowed = changed(config, "attention", **{**values, name: int(longest)})
        prepare(allowed, progress=False)
        with pytest.raises(ConfigError, match=f"Attention.{name} = {longest + 1} is above the "
                           f"{longest} frames of the longest utterance"):  # fmt: skip
            more = changed(config, "attention", **{**values, name: int(longest) + 1})
            prepare(more, progress=False)


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("training", {"label_smoothing": 0.1}, "Training.label_smoothing = 0.1 has no effect on C"),
        ("speech", {"train": ()}, "Data.train names no source"),
        ("speech", {"buckets": (80, 40)}, r"Data.buckets = \(80, 40\) must ascend"),
        ("speech", {"stride": 0}, "Speech.stride = 0 must be above 0"),
        ("speech", {"time_masks": -1}, "Speech.time_masks = -1 must not be negative"),
    ],
)
def test_settings_that_cannot_work_are_refused(config, section, values, message):
    with pytest.raises(ConfigError, match=message):
        prepare(changed(config, section, **values), progress=False)


def test_what_may_change_between_a_checkpoint_and_its_use(config):
    free = changed(config, "speech", beams=8, time_masks=3, test=("generated:z/1",))
    free = changed(free, "attention", kind="clustered", clusters=3)
    assert len(check_resumable(config, free)) == 5
    for values in ({"stack": 2}, {"unit": "words"}, {"mel_bands": 80}):
        with pytest.raises(ConfigError, match="this workdir holds another run"):
            check_resumable(config, changed(config, "speech", **values))
