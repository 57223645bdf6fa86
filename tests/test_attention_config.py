import dataclasses

import pytest

from brt import tasks
from brt.config import Attention, Config, Evaluation, Training
from brt.config_io import config_from_json, config_json
from brt.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clusters": 0}, "Attention.clusters = 0 must be above 0"),
        ({"top_k": -1}, "Attention.top_k = -1 must be above 0"),
        ({"iterations": 0}, "Attention.iterations = 0 must be above 0"),
        ({"min_length": -1}, "Attention.min_length = -1 must not be negative"),
        (
            {"fit_queries": 50},
            "Attention.fit_queries = 50 must not be below Attention.clusters = 100",
        ),
        ({"buckets": 7}, "Attention.buckets = 7 must be even"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Attention(**settings)


MASKED = Training(task="masked_language_modeling", segment_length=64)


@pytest.mark.parametrize("read", [Evaluation(), Evaluation(segment_length=64)])
@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"kind": "clustered", "clusters": 65}, "clusters"),
        ({"kind": "improved_clustered", "clusters": 65}, "clusters"),
        ({"kind": "improved_clustered", "clusters": 9, "top_k": 65}, "top_k"),
        ({"kind": "oracle_top_k", "top_k": 65}, "top_k"),
    ],
)
def test_numbers_that_no_sequence_reaches_are_refused(
    read: Evaluation, settings: dict, name: str
) -> None:
    """The limit is the segment length of training or evaluation. Operations handle shorter rows."""
    section = "Evaluation" if read.segment_length else "Training"
    training = dataclasses.replace(MASKED, segment_length=128) if read.segment_length else MASKED
    with pytest.raises(
        ConfigError,
        match=f"Attention.{name} = 65 is above {section}.segment_length = 64, the most that a "
        "sequence has; set it to 64 at most",
    ):
        tasks.check(Config(training=training, evaluation=read, attention=Attention(**settings)))
    enough = {**settings, name: 64}
    tasks.check(Config(training=training, evaluation=read, attention=Attention(**enough)))


def test_numbers_that_nothing_reads_may_be_any() -> None:
    for settings in (
        {"kind": "clustered", "clusters": 9, "top_k": 65},
        {"kind": "full", "clusters": 65, "top_k": 65},
        # Sequences shorter than min_length use exact attention.
        {"kind": "improved_clustered", "clusters": 65, "min_length": 65},
    ):
        tasks.check(Config(training=MASKED, attention=Attention(**settings)))


def test_is_saved_with_the_config() -> None:
    attention = Attention(kind="improved_clustered", clusters=25, fit_queries=64)
    training = Training(task="masked_language_modeling")
    config = Config(training=training, attention=attention)
    saved = config_json(config)
    assert config_from_json(saved) == config
    del saved["Attention"]  # as in the config of a run from before the section existed
    assert config_from_json(saved) == dataclasses.replace(config, attention=Attention())
