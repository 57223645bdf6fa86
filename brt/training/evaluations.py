"""Writes and reads reports of evaluations: the files `evaluations/<step>/<split>*` of a run."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from brt import untrusted
from brt.distributed import processes
from brt.formatting import finite, printable
from brt.tasks.arguments import Evaluator
from brt.tasks.interface import Task
from brt.tasks.report import EvaluationResult
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


def tag(split: str, evaluator: Evaluator, whole: bool) -> str:
    """Returns the prefix, such as "eval/validation", of the tags of a split's metrics.

    If training usually evaluates a part of the split, metrics of the whole split get another
    prefix, because the two kinds of numbers cannot be compared and must not share a curve.
    """
    return f"eval/{split}_whole" if whole and evaluator.partial else f"eval/{split}"


def scalars(
    task: Task, evaluator: Evaluator, split: str, report: Mapping[str, Any], whole: bool
) -> dict[str, float]:
    """Returns the metrics that are logged as curves, by tag: "eval/validation/bits_per_byte"."""
    prefix = tag(split, evaluator, whole)
    return {f"{prefix}/{name}": value for name, value in task.select_metrics(report).items()}


def write(
    workdir: Workdir,
    step: int,
    split: str,
    result: EvaluationResult,
    on_report: Callable[[Evaluated], object] = lambda evaluated: None,
    *,
    stored: bool = True,
) -> Evaluated:
    """Writes the files of an evaluation, and returns the evaluation's report.

    The JSON file with the metrics is written last, so its existence shows that the other files
    (JSON lines, text, plot and page) are complete. Only the first process writes. First,
    `on_report` is called with the report, so that the user sees it even if writing fails. `stored`
    = False writes nothing, because the run directory is read-only.
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
