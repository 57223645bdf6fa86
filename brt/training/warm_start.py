"""Weights that training starts from (Training.init_from): found, fitted to the run, taken."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

from brt import tasks
from brt.checkpointing import reader
from brt.config import Config
from brt.config.fields import settings
from brt.errors import CheckpointError, ConfigError
from brt.tasks.weights import Weights
from brt.training import saved
from brt.training.workdir import Workdir


def find(config: Config) -> Weights | None:
    """The weights that Training.init_from names; None where it names none.

    Raises:
      CheckpointError: there are none, or of another model.
    """
    where, task = config.training.init_from, tasks.of(config)
    if not where:
        return None
    if not reader.present(Workdir(Path(where)).checkpoints):
        return task.converted(config, Path(where))
    workdir, found, theirs = saved.load_config(Path(where))
    model = functools.cache(lambda: saved.load(workdir, found, theirs))
    return of_run(where, config, theirs, found.meta["tokenizer"])._replace(
        load=lambda: model().params, load_model_state=lambda: model().model_state
    )


def of_run(where: str, config: Config, theirs: Config, tokenizer: str) -> Weights:
    """What a run's config says of its weights.

    Raises:
      CheckpointError: it trained another model.
    """
    task, other = tasks.of(config), tasks.of(theirs)
    if other.model != task.model:
        raise CheckpointError(
            f"{where} is the run of another model: it trained {other.name}, and {task.name} starts "
            f"from weights of {type(getattr(config, task.model)).__name__}; name such a run in "
            "Training.init_from"
        )

    def nothing() -> Any:
        raise AssertionError("a run that goes on takes its parameters from its checkpoint")

    return Weights(where, getattr(theirs, task.model), tokenizer, other.name, nothing)


def with_model(config: Config, weights: Weights) -> Config:
    """The config with the weights' model, but for what is the run's own business.

    Raises:
      ConfigError: the config says something else about the model, or they read something else.
    """
    task = tasks.of(config)
    task.check_weights(weights)
    section = task.model
    return dataclasses.replace(
        config, **{section: _taken(getattr(config, section), weights.model, weights.where)}
    )


def _taken(asked: Any, found: Any, where: str) -> Any:
    kind, default = type(asked), type(asked)()
    taken = {}
    for name, declared in settings(kind).items():
        value, usual, old = (getattr(model, name) for model in (asked, default, found))
        adapted = declared.warm_start == "adaptable"
        if declared.warm_start == "own" or (adapted and value != usual):
            taken[name] = value
        elif not adapted and value not in (usual, old):
            raise ConfigError(
                f"{kind.__name__}.{name} = {value!r}, but the weights of Training.init_from = "
                f"{where!r} have {old!r}; leave it out"
            )
    return dataclasses.replace(found, **taken)
