"""The tasks that models can be trained on, which `TASKS` lists by name.

A task is imported when it is looked up, so a run imports no other task than its own.
"""

import importlib
from collections import UserDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from brt import memories  # noqa: F401, registers the kinds of layers
from brt.config import Config, Training
from brt.config.kinds import kind_sections
from brt.config.model import PARTS
from brt.config.names import task_field
from brt.config.shared import TASK_SECTIONS
from brt.config_io import config_values, suggestion
from brt.errors import ConfigError

if TYPE_CHECKING:
    from brt.tasks.interface import Task


class _Tasks(UserDict[str, Any]):
    """Maps names to tasks. A value is the text "module:class" until it is first looked up."""

    def __getitem__(self, name: str) -> "Task":
        value = self.data[name]
        if isinstance(value, str):
            module, _, cls = value.partition(":")
            value = self.data[name] = getattr(importlib.import_module(module), cls)()
        return value


TASKS = _Tasks({
    "language_modeling": "brt.tasks.language_modeling.task:LanguageModeling",
    "masked_language_modeling": "brt.tasks.masked_language_modeling.task:MaskedLanguageModeling",
    "summarization": "brt.tasks.summarization.task:Summarization",
    "speech_recognition": "brt.tasks.speech_recognition.task:SpeechRecognition",
    "text_classification": "brt.tasks.text_classification.task:TextClassification",
    "text_regression": "brt.tasks.text_classification.task:TextRegression",
    "extractive_qa": "brt.tasks.extractive_qa.task:ExtractiveQa",
})  # fmt: skip


def register_task(task: "Task") -> None:
    """Adds a task to `TASKS`, so that Training.task may name it. The name must not be in use."""
    if task.name in TASKS:
        raise ConfigError(f"there is a task named {task.name!r} already; take another name")
    TASK_SECTIONS[task.name] = task.sections
    TASKS[task.name] = task


def from_config(config: Config) -> "Task":
    return by_name(config.training.task)


def by_name(name: str) -> "Task":
    """Returns the task called `name`; raises ConfigError if there is no such task."""
    if name not in TASKS:
        raise ConfigError(
            f"Training.task = {name!r} must be one of {', '.join(map(repr, TASKS))}"
            f"{suggestion(name, TASKS)}"
        )
    return TASKS[name]


def check(config: Config, origins: Mapping[str, str] | None = None) -> None:
    """Raises ConfigError for settings that the task rejects, or that would have no effect.

    A setting that only other tasks read has no effect. It is rejected only if it is bound to
    another value than its default. `origins` maps the name of each bound setting to the place that
    binds it: a file and line, or a flag. If `origins` is None, settings without an effect are not
    looked for.
    """
    task = from_config(config)
    # If a run starts from weights, the weights determine some settings. These settings are not
    # known when the command line calls this function (with `origins`). The run calls the function
    # again (without `origins`) when they are known, and the task checks them then.
    if origins is None or not config.training.init_from:
        task.check(config)
    readers = {name: _sections(name) for name in TASK_SECTIONS}
    unread = {}
    for name in origins or {}:
        section = (task_field(name, task.name) or name).partition(".")[0]
        others = [other for other, sections in readers.items() if section in sections]
        if others and task.name not in others:
            unread[name] = others[0]
    if not (origins and unread):
        return
    defaults = config_values(Config(training=Training(task=task.name)))
    values = config_values(config)
    for name, other in unread.items():
        if values[name] != defaults[name]:
            raise ConfigError(
                f"{origins[name]}: {name} has no effect if Training.task = {task.name!r}; "
                f"set Training.task = {other!r}, or remove {name}"
            )


def unread_sections(config: Config) -> set[str]:
    """Returns the config sections that only other tasks read; printed configs omit them."""
    every = set().union(*map(_sections, TASK_SECTIONS))
    return every - _sections(config.training.task)


def _sections(task: str) -> set[str]:
    own = TASK_SECTIONS[task]
    return {*own, *((*PARTS, *kind_sections()) if "Model" in own else ())}
