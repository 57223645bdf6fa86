"""Tests the properties that every task declares, and settings that all tasks refuse."""

import dataclasses

import pytest

from brt import tasks
from brt.config import Config, Encoder, Pairs, Training
from brt.config.names import section_types
from brt.errors import ConfigError
from brt.tasks import TASKS
from brt.tasks.interface import Task

each = pytest.mark.parametrize("task", TASKS.values(), ids=list(TASKS))


def config(task: str, **sections: object) -> Config:
    return Config(training=Training(task=task), **sections)


@each
def test_every_task_says_what_it_reads_and_what_it_is_measured_by(task: Task) -> None:
    assert TASKS[task.name] is task is tasks.from_config(config(task.name))
    sections = {type(getattr(Config(), name)).__name__ for name in (task.model, task.data)}
    assert sections <= set(task.sections) <= set(section_types())
    for metrics in (task.metrics, task.table_metrics):
        assert metrics and len({m.name for m in metrics}) == len(metrics)
        for measure in metrics:
            assert measure.title and format(0.5, measure.form)
    summary = task.metrics[0]
    assert task.select_metrics({summary.name: 1.0, "else": 2.0}) == {summary.name: 1.0}
    assert summary.title.startswith("bits"), "training is drawn in the same units"


@each
def test_every_task_says_what_comes_next(task: Task) -> None:
    commands = task.next_steps("runs/a b")
    assert commands[0].startswith("python -m brt.evaluate --workdir=runs/a b --split=test")
    assert any("brt.generate" in command for command in commands) == task.generates_text


def test_an_unknown_task_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError) as refused:
        tasks.by_name("nonsense")
    assert str(refused.value).startswith("Training.task = 'nonsense' must be one of 'langu")
    assert all(repr(name) in str(refused.value) for name in TASKS)
    with pytest.raises(ConfigError, match="did you mean 'text_classification'"):
        tasks.from_config(config("clasification"))


def test_settings_that_nothing_would_read_are_refused() -> None:
    """Default values and a shared cache directory are accepted although nothing reads them."""
    pairs = Pairs(prefix="a", cache_dir="cache")
    origins = {"Pairs.prefix": "a.gin:3", "Data.cache_dir": "a.gin:4"}
    with pytest.raises(
        ConfigError,
        match=r"^a.gin:3: Pairs.prefix has no effect if Training.task = "
        r"'language_modeling'; set Training.task = 'summarization', or remove Pairs.prefix$",
    ):
        tasks.check(config("language_modeling", pairs=pairs), origins)
    tasks.check(config("summarization", pairs=pairs), origins)
    harmless = dataclasses.replace(pairs, prefix="")
    tasks.check(config("language_modeling", pairs=harmless), origins)
    with pytest.raises(ConfigError, match="--gin_bindings: Encoder.norm_first has no effect if"):
        asked = config("summarization", encoder=Encoder(norm_first=False))
        tasks.check(asked, {"Encoder.norm_first": "--gin_bindings"})
