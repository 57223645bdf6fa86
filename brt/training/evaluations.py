"""Evaluates trained models, and writes and reads the files `evaluations/<step>/<split>*` of a run.

`write` is also called by the trainer, which evaluates the split SPLIT.
"""

import contextlib
import errno
import functools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from brt import output, tasks, untrusted
from brt.checkpointing import reader
from brt.config.checks import check
from brt.config_io import config_from_json
from brt.distributed import processes
from brt.distributed.mesh import AXES
from brt.errors import BrtError, ConfigError, DataError, NonFiniteError
from brt.formatting import finite, printable
from brt.tasks.arguments import Control, EvaluationRequest, Evaluator, InspectionRequest, OtherModel
from brt.tasks.interface import Task
from brt.tasks.report import EvaluationResult
from brt.training import saved_model
from brt.training import workdir as workdirs
from brt.training.saved_model import SavedModel
from brt.training.workdir import Workdir, check_writable, write_bytes, write_json, write_text

SPLIT = "validation"  # Training evaluates this split.
_REPORT = {
    "step?": int,
    "ablation?": {"protocol?": dict},
    "rouge?": {str: {"f1": untrusted.NUMBER}},
}


class Evaluated(NamedTuple):
    """The report of an evaluation, in the forms in which it was written."""

    report: dict[str, Any]  # the metrics and the step of the checkpoint, as JSON
    text: str  # the report as text for people, with a title
    line: str  # one line with the step, the split and the most important metrics


OnResult = Callable[[Evaluated], object]


def scalars(
    task: Task, evaluator: Evaluator, split: str, report: Mapping[str, Any], whole: bool
) -> dict[str, float]:
    """Returns the metrics of `report` that are logged, with tags as keys.

    A tag is, for example, "eval/validation/bits_per_byte". If training usually evaluates only a
    part of the split, metrics of the whole split (`whole`) have another prefix. Numbers of a part
    and of the whole cannot be compared, so they must not share a curve.
    """
    prefix = f"eval/{split}_whole" if whole and evaluator.partial else f"eval/{split}"
    return {f"{prefix}/{name}": value for name, value in task.select_metrics(report).items()}


def write(
    workdir: Workdir,
    step: int,
    split: str,
    result: EvaluationResult,
    on_report: OnResult = lambda evaluated: None,
    *,
    stored: bool = True,
) -> Evaluated:
    """Writes the files of an evaluation, and returns the evaluation's report.

    The JSON file with the metrics is written last, so its existence shows that the other files
    (JSON lines, text, plot and page) are complete. Only the first process writes. Before it writes,
    it calls `on_report` with the report, so that the user sees the report even if writing fails. If
    `stored` is False, because the run directory is read-only, nothing is written.
    """
    directory, name = workdir.evaluations / str(step), f"{split}{result.name}"
    report = {"step": step, **result.metrics}
    text = f"{workdir.path}, step {step}, {split}: {result.text}"
    evaluated = Evaluated(report, text, f"step {step}: {split} {result.summary}")
    if not processes.is_first():
        return evaluated
    on_report(evaluated)
    if not stored:
        return evaluated
    check_writable(directory, below=workdir.path)
    for kind, rows in result.rows.items():
        lines = "".join(json.dumps(finite(row)) + "\n" for row in rows)
        write_text(directory / f"{name}_{kind}.jsonl", lines, below=workdir.path)
    write_text(directory / f"{name}.txt", printable(text) + "\n", below=workdir.path)
    if result.draw:
        write_bytes(workdir.plots / f"{name}.png", result.draw(), below=workdir.path)
    if result.page:
        write_text(workdir.plots / f"{name}.html", result.page(), below=workdir.path)
    write_json(directory / f"{name}.json", finite(report), below=workdir.path)
    return evaluated


def read(path: Path) -> dict[str, Any]:
    """Returns the content of a JSON file that `write` wrote; raises OSError or ValueError."""
    return untrusted.read_json(path, _REPORT)


LINE_SECONDS = 60.0  # If stderr is not a terminal, at least this time passes between two lines.


@contextlib.contextmanager
def display(total: int, text: str, unit: str) -> Iterator[Callable[[int], object]]:
    """Context that shows the progress of some work, and yields a function that reports progress.

    The function is called with the amount of work done since its last call. On a terminal, stderr
    shows a bar. Otherwise at most one line per minute is printed, and the first line comes after a
    minute. `text` is the name of the work, such as "reading test", and `unit` is the unit of
    `total`. If the unit is "tok" (tokens), the bar abbreviates large numbers.
    """
    done, last = 0, time.monotonic()

    def say_regularly(amount: int) -> None:
        nonlocal done, last
        done += amount
        if time.monotonic() - last >= LINE_SECONDS:
            last = time.monotonic()
            name = "tokens" if unit == "tok" else unit
            output.say(f"{text}: {done:,} of {total:,} {name}")

    with tqdm(total=total, desc=text, unit=unit, unit_scale=unit == "tok", disable=None) as bar:
        yield say_regularly if bar.disable else bar.update


_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)


def open_evaluator(
    model: SavedModel,
    split: str,
    ablate: str | None,
    windows: tuple[int, ...] = (),
    other: SavedModel | None = None,
    generate: bool = False,
) -> Evaluator:
    """Opens a split, and returns an `Evaluator` of the run's checkpoints on this split.

    `ablate` is a part of the carry ("cache", "state", "memory", or "both" for all three) that a
    second evaluation resets before every segment. A language model is evaluated once with each of
    the `windows`, which are numbers of tokens that replace Model.window. `other` is a model to
    compare `model` with on the same documents; in this case `ablate` is a part of the memory of
    `other`. If `generate` is True, completions that the model writes are scored, too.
    """
    config, task = model.config, tasks.from_config(model.config)
    check(
        not windows or task.compares_windows,
        f"--windows is for language models, and {config.training.task!r} is none",
    )
    check(
        not generate or task.compares_windows,
        f"--generate is for language models; {config.training.task!r} generates without it",
    )
    check(
        not (generate and (windows or other)),
        "--generate, --windows and --compare are different measurements; leave two of them out",
    )
    compared = None
    if other:
        both_tasks = task, tasks.from_config(other.config)
        check(
            all(compared_task.compares_models for compared_task in both_tasks),
            "--compare is for two language models, and these runs are of "
            + " and ".join(compared_task.name for compared_task in both_tasks),
        )
        check(
            other.mesh == model.mesh,
            "--compare needs both runs on the same mesh; set Mesh for both, for example with "
            + " ".join(f"--gin.Mesh.{axis}=1" for axis in AXES),
        )
    dataset, trained = saved_model.open_split(model, split), config_from_json(model.meta["config"])
    if other:
        data, name = saved_model.open_split(other, split), str(other.workdir.path)
        compared = OtherModel(name, other.step, other.config, data, other.variables)
    return task.evaluator(
        EvaluationRequest(
            config, dataset, split, trained, ablate,
            windows=windows, other=compared, generate=generate,
        )
    )  # fmt: skip


def evaluate(
    model: SavedModel, split: str, ablate: str | None, on_result: OnResult = lambda evaluated: None,
    *, windows: tuple[int, ...] = (), other: SavedModel | None = None,
    generate: bool = False, evaluator: Evaluator | None = None,
) -> Evaluated:  # fmt: skip
    """Evaluates one checkpoint of a run on one split, and writes and returns the report.

    `on_result` is called with the report before it is written. `evaluator` is an evaluator that was
    used for another checkpoint of the run; if it is None, `open_evaluator` opens a new one.
    """
    if model.own_tokenizer is not None:
        raise ConfigError(
            f"{model.workdir.path} is in Hugging Face's format, and evaluations are stored in run "
            "directories; convert it with brt.convert, or call bits_per_byte"
        )
    stored = can_store(model.workdir)
    evaluator = evaluator or open_evaluator(model, split, ablate, windows, other, generate)
    reading = display(evaluator.total, f"reading {split}", evaluator.unit)
    with reading as update, model.on_devices():
        result = evaluator(model.variables, Control(progress=update))
    assert result, "nothing stops it"
    metrics = tasks.from_config(model.config).select_metrics(result.metrics)
    name, value = next(iter(metrics.items()))
    if not math.isfinite(value):
        raise NonFiniteError(
            f"{name} of {split} is {value} at step {model.step} of {model.workdir.path}; evaluate "
            "another --step"
        )
    return write(model.workdir, model.step, split, result, on_result, stored=stored)


def inspect(
    model: SavedModel, split: str, tokens: int | None, on_text: Callable[[str], object]
) -> dict[str, Any]:
    """Measures how a model uses its memory; writes the metrics to the run directory.

    The files are evaluations/<step>/<split>_probe.json, and pictures in the directory plots. The
    metrics are also returned, with the entries "workdir" and "step". About `tokens` tokens are read
    (None: the default, 0: all). `on_text` is called with the report as text before files are
    written. ConfigError is raised for a model without memory.
    """
    directory, task = model.workdir.evaluations / str(model.step), tasks.from_config(model.config)
    stored = can_store(model.workdir)
    where = {"workdir": str(model.workdir.path), "step": model.step}
    dataset = saved_model.open_split(model, split)
    # One of the measurements replaces a document's memory by the memory of another document. If the
    # split has only one document, the other document is taken from the training data, if available.
    with contextlib.suppress(DataError):
        dataset.splits.setdefault("train", saved_model.open_split(model, "train").split("train"))
    with model.on_devices():
        request = InspectionRequest(model.config, dataset, split, tokens, where)
        result = task.inspect(model.variables, request)
    on_text(result.text)
    if not stored:
        return result.metrics
    check_writable(directory, below=model.workdir.path)
    report = directory / f"{split}_probe.json"
    write_json(report, result.metrics, below=model.workdir.path)
    for name, picture in result.draw().items():
        write_bytes(model.workdir.plots / name, picture, below=model.workdir.path)
    return result.metrics


def can_store(workdir: Workdir) -> bool:
    """Returns True if results can be stored in a run directory.

    The function is called before the results are computed. If the run directory is read-only, a
    message says so once. If there are several processes, only the first stores results.
    ConfigError is raised if a path to write to is a link.
    """
    if not processes.is_first():
        return False
    try:
        for directory in (workdir.evaluations, workdir.plots):
            check_writable(directory, below=workdir.path)
    except BrtError as error:
        cause = error.__cause__
        if not isinstance(cause, OSError) or cause.errno not in _READ_ONLY:
            raise
        _say_once(
            f"the results are not stored in {workdir.path}, which cannot be written "
            f"({cause.strerror}); --json=FILE writes them elsewhere"
        )
        return False
    workdirs.refuse_links(workdir)
    return True


@functools.cache  # The cache makes the function print each message only once.
def _say_once(message: str) -> None:
    reader.warn_on_stderr(message)
