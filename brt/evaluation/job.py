"""A trained model and a split, to a report in the workdir."""

import contextlib
import math
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from brt import tasks
from brt.config import Config
from brt.config_io import config_from_json
from brt.distributed import processes
from brt.errors import DataError, NonFiniteError
from brt.tasks.evaluators import Evaluator
from brt.tasks.report import EvaluationResult
from brt.training import evaluations
from brt.training import workdir as workdirs
from brt.training.evaluations import Evaluated
from brt.training.start import saved_model
from brt.training.start.saved_model import SavedModel
from brt.training.workdir import Workdir

Tell = Callable[[Evaluated], object]


def _silent(found: Evaluated) -> None:
    """Tells nobody."""


class SplitReader:
    """Evaluates checkpoints of one run on one split; prepared and compiled once.

    Args:
      config: of the run, with what depends on data written out; changed where that makes sense.
      ablate: what to take away in a second reading.
      tell: told what was found, before it is written.

    Raises:
      ConfigError: something is to be taken away that the model does not have.
      DataError: the corpus has no such split.

    Attributes:
      evaluator: what reads; None before the first checkpoint.
    """

    def __init__(self, config: Config, split: str, ablate: str | None, tell: Tell = _silent):
        self._task, self._config, self._split = tasks.from_config(config), config, split
        self._ablate, self._tell = ablate, tell
        self.evaluator: Evaluator | None = None

    def __call__(self, model: SavedModel) -> Evaluated:
        """Reads the split and writes the report; see `brt.training.evaluations.write`.

        Raises:
          CheckpointError: the run lacks its tokenizer.
          ConfigError: the workdir cannot be written.
          NonFiniteError: the headline figure is no number.
        """
        _check_place(model.workdir)
        if self.evaluator is None:
            dataset = saved_model.open_split(model, self._split)
            self.evaluator = self._task.evaluator(
                self._config, dataset, self._split, ablate=self._ablate,
                trained=config_from_json(model.meta["config"]),
            )  # fmt: skip
        read, name = self.evaluator, f"reading {self._split}"
        scale = read.unit == "tok"
        with tqdm(
            total=read.total, desc=name, unit=read.unit, unit_scale=scale, disable=None
        ) as bar:
            with model.on_devices():
                reading = read(model.params, model_state=model.model_state, progress=bar.update)
        self._check_finite(reading, model)
        return evaluations.write(model.workdir, model.step, self._split, reading, self._tell)

    def _check_finite(self, reading: EvaluationResult, model: SavedModel) -> None:
        name, value = next(iter(self._task.select_metrics(reading.metrics).items()))
        if not math.isfinite(value):
            raise NonFiniteError(
                f"{name} of {self._split} is {value} at step {model.step} of "
                f"{model.workdir.path}; evaluate another --step"
            )


def evaluate(model: SavedModel, split: str, ablate: str | None, tell: Tell = _silent) -> Evaluated:
    """The report of one checkpoint; see `SplitReader`."""
    return SplitReader(model.config, split, ablate, tell)(model)


def inspect(
    model: SavedModel, split: str, tokens: int | None, tell: Callable[[str], object]
) -> dict[str, Any]:
    """All about a model's memory; writes evaluations/<step>/<split>_probe.json and plots/.

    Args:
      tokens: read about so many; None: as many as usual; 0: all.
      tell: told the figures as people read them, before they are written.

    Returns:
      The figures, with `workdir` and `step`.

    Raises:
      ConfigError: the model has no memory, or the workdir cannot be written.
      DataError: the corpus has no such split.
      CheckpointError: the model knows another tokenizer.
    """
    directory, task = model.workdir.evaluations / str(model.step), tasks.from_config(model.config)
    _check_place(model.workdir)
    where = {"workdir": str(model.workdir.path), "step": model.step}
    dataset = saved_model.open_split(model, split)
    with contextlib.suppress(DataError):  # a split of one document borrows another
        dataset.splits.setdefault("train", saved_model.open_split(model, "train").split("train"))
    with model.on_devices():
        found = task.inspect(
            model.config, dataset, model.params, split, tokens, where, model.model_state
        )
    tell(found.text)
    workdirs.check_writable(directory, below=model.workdir.path)
    report = directory / f"{split}_probe.json"
    workdirs.write_json(report, found.metrics, below=model.workdir.path)
    for name, picture in found.draw().items():
        workdirs.write_bytes(model.workdir.plots / name, picture, below=model.workdir.path)
    return found.metrics


def _check_place(workdir: Workdir) -> None:
    """Raises ConfigError before work is done whose result could not be written there."""
    if processes.is_first():
        workdirs.refuse_links(workdir)
        for directory in (workdir.evaluations, workdir.plots):
            workdirs.check_writable(directory, below=workdir.path)
