"""Weights that a new run starts from (Training.init_from): finds them and adapts the config."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np

from brt import tasks
from brt.checkpointing import reader
from brt.checkpointing.reader import VerifiedCheckpoint
from brt.config import Config, Data, Model
from brt.config.fields import settings
from brt.config.kinds import kind_sections
from brt.config.model import PARTS
from brt.config.shared import public_name
from brt.config_io import config_from_json
from brt.errors import CheckpointError, ConfigError
from brt.tasks.weights import Weights
from brt.training import saved_model
from brt.training.workdir import Workdir

_BYTES = Data().tokenizer


def find_weights(config: Config, checkpoint: VerifiedCheckpoint | None = None) -> Weights | None:
    """Returns the weights that Training.init_from names; None if the setting is empty.

    Training.init_from names a run directory, or a directory of weights that brt.convert wrote. If
    the run resumes from a checkpoint, the checkpoint describes the weights, and nothing is read.
    """
    where, task = config.training.init_from, tasks.from_config(config)
    if not where:
        return None
    if checkpoint:
        saved = config_from_json(checkpoint.meta["config"])
        return weights_of_run(where, config, saved, checkpoint.meta["tokenizer"])
    if not reader.present(Workdir(Path(where)).checkpoints):
        return task.load_converted(config, Path(where))
    workdir, checkpoint, source_config = saved_model.load_config(Path(where))
    model = functools.cache(lambda: saved_model.load(workdir, checkpoint, source_config))
    weights = weights_of_run(where, config, source_config, checkpoint.meta["tokenizer"])
    return weights._replace(
        load=lambda: model().params, load_model_state=lambda: model().model_state,
        tokenizer_file=_tokenizer_file(workdir),
    )  # fmt: skip


def _tokenizer_file(workdir: Workdir) -> str:
    """Returns the path of the file of a run's tokenizer; "" if the run has none."""
    names = ("tokenizer.json", "tokenizer.model")
    paths = [workdir.tokenizer / name for name in names if (workdir.tokenizer / name).is_file()]
    return str(paths[0]) if paths else ""


def weights_of_run(where: str, config: Config, source_config: Config, tokenizer: str) -> Weights:
    """Returns a `Weights` that only describes the weights of a run and cannot load their arrays.

    A resumed run needs only the description, because its parameters come from its own checkpoint.
    `where` is as in Training.init_from, `source_config` the config of the run that trained the
    weights, and `tokenizer` a fingerprint.
    """
    task, source_task = tasks.from_config(config), tasks.from_config(source_config)
    if source_task.model != task.model:
        raise CheckpointError(
            f"{where} is the run of another model: it trained {source_task.name}, and {task.name} "
            f"starts from weights of {type(getattr(config, task.model)).__name__}; name such a run "
            "in Training.init_from"
        )

    def load() -> Any:
        raise AssertionError("a resumed run takes its parameters from its own checkpoint")

    return Weights(
        where, getattr(source_config, task.model), tokenizer, source_task.name, load,
        tokenizer_file=getattr(getattr(source_config, source_task.data), "tokenizer", ""),
    )  # fmt: skip


def with_model(config: Config, weights: Weights) -> Config:
    """Returns a config whose model section is merged with the model section of the weights.

    Each setting of the model declares in `brt.config` where its value comes from. The value of an
    "own" setting comes from the new run, and the value of an "inherited" setting from the weights.
    The value of an "adaptable" setting comes from the new run if it is not the default there,
    otherwise from the weights. ConfigError is raised if the config contradicts the weights.
    """
    task = tasks.from_config(config)
    task.check_weights(weights)
    section = task.model
    requested, trained, where = getattr(config, section), weights.model, weights.where
    changes = _changes(requested, trained, where)
    if isinstance(requested, Model):
        types = kind_sections().values()
        kinds = (_merged(requested.of(kind), trained.of(kind), where) for kind in types)
        changes["kinds"] = tuple(kind for kind in kinds if any(kind.layers_by_kind().values()))
        for field in PARTS.values():
            changes[field] = _merged(getattr(requested, field), getattr(trained, field), where)
    model = dataclasses.replace(trained, **changes)
    data = config.data
    if isinstance(requested, Model) and weights.tokenizer_file and data.tokenizer == _BYTES:
        data = dataclasses.replace(data, tokenizer=weights.tokenizer_file)
    return dataclasses.replace(config, **{section: model, "data": data})


def _equal(value: Any, old: Any) -> bool:
    """Returns True if two values of a setting are equal, floats up to the rounding to float32.

    Weights that were converted from other formats have, for example, 9.9999997e-06 for 1e-05.
    """
    if isinstance(value, float) and isinstance(old, float):
        return bool(np.float32(value) == np.float32(old))
    return bool(value == old)


def _merged(requested: Any, trained: Any, where: str) -> Any:
    """Returns the section `trained`, with the settings that `requested` may and does change."""
    return dataclasses.replace(trained, **_changes(requested, trained, where))


def _changes(requested: Any, trained: Any, where: str) -> dict[str, Any]:
    """Returns the settings of `requested` that replace those of the section `trained`, by name."""
    section, defaults = type(requested), type(requested)()
    changes: dict[str, Any] = {}
    for name, setting in settings(section).items():
        value, default, old = (getattr(model, name) for model in (requested, defaults, trained))
        adaptable = setting.warm_start == "adaptable"
        if setting.warm_start == "own" or (adaptable and value != default):
            changes[name] = value
        elif not adaptable and not (value == default or _equal(value, old)):
            own = f"{section.__name__}.{name}"
            raise ConfigError(
                f"{public_name(own)} = {value!r}, but the weights of Training.init_from = "
                f"{where!r} have {old!r}; leave it out"
            )
    return changes
