"""A trained model and a split, to a report in the workdir."""

import contextlib
from typing import Any

from tqdm import tqdm

from brt import tasks
from brt.config import Config
from brt.config_io import config_from_json
from brt.errors import DataError
from brt.tasks.protocol import Evaluator
from brt.training import evaluations, saved
from brt.training import workdir as workdirs
from brt.training.evaluations import Evaluated
from brt.training.saved import SavedModel


class SplitReader:
    """Evaluates checkpoints of one run on one split; prepared and compiled once.

    Args:
      config: of the run, with what depends on data written out; changed where that makes sense.
      ablate: what to take away in a second reading.

    Raises:
      ConfigError: something is to be taken away that the model does not have.
      DataError: the corpus has no such split.

    Attributes:
      evaluator: what reads; None before the first checkpoint.
    """

    def __init__(self, config: Config, split: str, ablate: str | None):
        self._task, self._config, self._split = tasks.of(config), config, split
        self._ablate = ablate
        self.evaluator: Evaluator | None = None

    def __call__(self, model: SavedModel) -> Evaluated:
        """Reads the split and writes the report; see `brt.training.evaluations.write`.

        Raises:
          CheckpointError: the run lacks its tokenizer.
        """
        if self.evaluator is None:
            corpus = saved.open_split(model, self._split)
            self.evaluator = self._task.evaluator(
                self._config, corpus, self._split, ablate=self._ablate,
                trained=config_from_json(model.meta["config"]),
            )  # fmt: skip
        read, name = self.evaluator, f"reading {self._split}"
        scale = read.unit == "tok"
        with tqdm(
            total=read.total, desc=name, unit=read.unit, unit_scale=scale, disable=None
        ) as bar:
            with model.on_devices():
                reading = read(model.params, model_state=model.model_state, progress=bar.update)
        return evaluations.write(model.workdir, model.step, self._split, reading)


def evaluate(model: SavedModel, split: str, ablate: str | None) -> Evaluated:
    """The report of one checkpoint."""
    return SplitReader(model.config, split, ablate)(model)


def inspect(model: SavedModel, split: str, tokens: int | None) -> tuple[dict[str, Any], str]:
    """All about a model's memory; writes evaluations/<step>/<split>_probe.json and plots/.

    Args:
      tokens: read about so many; None: as many as usual; 0: all.

    Returns:
      The figures, with `workdir` and `step`, and the same as people read them.

    Raises:
      ConfigError: the model has no memory.
      DataError: the corpus has no such split.
      CheckpointError: the model knows another tokenizer.
    """
    task = tasks.of(model.config)
    where = {"workdir": str(model.workdir.path), "step": model.step}
    corpus = saved.open_split(model, split)
    with contextlib.suppress(DataError):  # a split of one document borrows another
        corpus.splits.setdefault("train", saved.open_split(model, "train").split("train"))
    with model.on_devices():
        found = task.inspect(model.config, corpus, model.params, split, tokens, where)
    directory = model.workdir.evaluations / str(model.step)
    directory.mkdir(parents=True, exist_ok=True)
    workdirs.write_json(directory / f"{split}_probe.json", found.figures)
    found.draw(model.workdir.plots)
    return found.figures, found.text
