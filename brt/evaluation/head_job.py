"""An evaluation of what reads sentences or finds answers, from a workdir to a report."""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from tqdm import tqdm

from brt.config import Config
from brt.config_io import config_from_json
from brt.data.questions import preparation as questions
from brt.data.questions.preparation import QuestionCorpus
from brt.data.sentences import preparation as sentences
from brt.data.sentences.preparation import SentenceCorpus
from brt.evaluation.classification import Classifier
from brt.evaluation.heads import Reading, refuse_ablation
from brt.evaluation.regression import Regressor
from brt.evaluation.spans import Answerer
from brt.training import workdir as workdirs
from brt.training.saved import SavedModel, check_tokenizer
from brt.training.workdir import Workdir


class Task(NamedTuple):
    """What each has of its own.

    Attributes:
      score: the figure that sums up, in percent.
      columns: of the table in a report: figures, and how each is written.
    """

    prepare: Callable[[Config], SentenceCorpus | QuestionCorpus]
    read: Callable[[Config], Classifier | Regressor | Answerer]
    score: str
    columns: dict[str, str]


TASKS = {
    "classification": Task(
        lambda config: sentences.prepare(config.sentences),
        Classifier,
        "accuracy",
        {"accuracy": ".2f", "f1": ".2f", "matthews": ".4f", "bits_per_label": ".4f"},
    ),
    "regression": Task(
        lambda config: sentences.prepare(config.sentences, numbers=True),
        Regressor,
        "pearson",
        {
            "pearson": ".2f",
            "spearman": ".2f",
            "root_mean_square_error": ".3f",
            "bits_per_number": ".4f",
        },
    ),
    "spans": Task(
        lambda config: questions.prepare(config.questions),
        Answerer,
        "f1",
        {"exact_match": ".2f", "f1": ".2f", "bits_per_place": ".4f"},
    ),
}
_PERCENT = ("accuracy", "f1", "exact_match", "pearson", "spearman")


class HeadReader:
    """Evaluates checkpoints of one run on one split; prepared and compiled once.

    Args:
      config: of the run, with its vocabulary size; `attention` may be another.

    Raises:
      ConfigError: something is to be taken away that an encoder does not have.
      DataError: the corpus has no such split.
    """

    def __init__(self, config: Config, split: str, ablate: str | None = None):
        refuse_ablation(ablate)
        self._task = TASKS[config.training.objective]
        corpus = self._task.prepare(config)
        self._config, self._split = config, split
        self._tokenizer, self._store = corpus.tokenizer, corpus.split(split)
        self._read = self._task.read(config)

    def __call__(self, model: SavedModel) -> dict[str, Any]:
        """The figures; see `read`."""
        return self.read(model)[0]

    def read(self, model: SavedModel) -> tuple[dict[str, Any], str]:
        """Reads the split; see `write`.

        Raises:
          CheckpointError: the model knows another tokenizer.
        """
        check_tokenizer(model, self._tokenizer)
        trained = config_from_json(model.meta["config"])
        with tqdm(total=len(self._store), desc=f"reading {self._split}", disable=None) as bar:
            reading = self._read(model.params, self._store, progress=bar.update)
        return write(model.workdir, model.step, self._split, trained, [reading])


def write(
    workdir: Workdir, step: int, split: str, trained: Config, readings: list[Reading]
) -> tuple[dict[str, Any], str]:
    """Writes predictions and the report into evaluations/<step>/.

    Under the name of the split; with another kind of attention than the model was trained with,
    that is added to it.

    Args:
      trained: what the model was trained with.
      readings: the first is reported; others of the same weights go beside it in the text.

    Returns:
      The report, and the same as people read it.
    """
    first, before = readings[0], trained.attention.kind
    task = TASKS[trained.training.objective]
    score = {"score": first.figures[task.score], "score_name": task.score}
    report = {"step": step, **first.figures, **score, "trained_with": before}
    name = split if first.kind == before else f"{split}_{first.kind}"
    directory = workdir.evaluations / str(step)
    directory.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in first.rows)
    workdirs.write_text(directory / f"{name}_predictions.jsonl", lines)
    read = text(f"{workdir.path}, step {step}, {split}", report, readings, task.columns)
    workdirs.write_text(directory / f"{name}.txt", read + "\n")
    workdirs.write_json(directory / f"{name}.json", report)  # last: it says that all is done
    return report, read


def text(
    title: str, report: dict[str, Any], readings: list[Reading], columns: dict[str, str]
) -> str:
    """The report as people read it: figures by attention, and a few predictions."""
    left_out = f" ({report['left_out']:,} left out)" if report["left_out"] else ""
    count = f"{report['questions']:,} questions" if "questions" in report else (
        f"{report['rows']:,} sentences"
    )  # fmt: skip
    shown = [name for name in columns if name in report]
    head = "".join(f"{name.replace('_', ' '):>16}" for name in shown)
    lines = [
        f"{title}: {count}{left_out}, trained with {report['trained_with']} attention",
        "",
        f"{'attention':<20}{head}{'tokens/s':>12}",
    ]
    for reading in readings:
        f = reading.figures
        cells = [f"{f[name]:{columns[name]}}{' %' * (name in _PERCENT)}" for name in shown]
        row = "".join(f"{cell:>16}" for cell in cells)
        lines.append(f"{f['attention']:<20}{row}{f['tokens_per_second']:>12,.0f}")
    return "\n".join([*lines, "", *readings[0].shown])
