"""What can be learned. `TASKS` is the one place where the tasks are named."""

from collections.abc import Mapping

from brt.config import Config
from brt.config_io import config_values, suggestion
from brt.errors import ConfigError
from brt.tasks.extractive_qa.task import ExtractiveQa
from brt.tasks.language_modeling.task import LanguageModeling
from brt.tasks.masked_language_modeling.task import MaskedLanguageModeling
from brt.tasks.protocol import Task
from brt.tasks.speech_recognition.task import SpeechRecognition
from brt.tasks.summarization.task import Summarization
from brt.tasks.text_classification.task import TextClassification, TextRegression

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        LanguageModeling(), MaskedLanguageModeling(), Summarization(), SpeechRecognition(),
        TextClassification(), TextRegression(), ExtractiveQa(),
    )
}  # fmt: skip


def of(config: Config) -> Task:
    """The task that Training.task names.

    Raises:
      ConfigError: there is no such task; lists those that there are.
    """
    return named(config.training.task)


def named(name: str) -> Task:
    """The task of that name; raises as `of`."""
    if name not in TASKS:
        raise ConfigError(
            f"Training.task = {name!r} must be one of {', '.join(map(repr, TASKS))}"
            f"{suggestion(name, TASKS)}"
        )
    return TASKS[name]


def check(config: Config, origins: Mapping[str, str] | None = None) -> None:
    """Refuses settings that clash in their task, or that nothing would ever read.

    Args:
      origins: where each was bound; to say a default is no harm.
    """
    task = of(config)
    task.check(config)
    defaults, values = config_values(Config()), config_values(config)
    own = {section for other in TASKS.values() for section in other.sections}
    for name, origin in (origins or {}).items():
        section, _, field = name.partition(".")
        unread = section in own and section not in task.sections and field != "cache_dir"
        if unread and values[name] != defaults[name]:
            others = [other.name for other in TASKS.values() if section in other.sections]
            raise ConfigError(
                f"{origin}: {name} means nothing where Training.task = {task.name!r}; "
                f"set Training.task = {others[0]!r}, or leave it out"
            )
