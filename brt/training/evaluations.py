"""What evaluations leave in a workdir: `evaluations/<step>/<split>*`."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from brt import untrusted
from brt.distributed import processes
from brt.formatting import finite
from brt.tasks.protocol import Evaluator, Task
from brt.tasks.report import EvaluationResult
from brt.training.workdir import Workdir, check_writable, write_bytes, write_json, write_text

SPLIT = "validation"  # the split that is evaluated during training
_REPORT = {
    "step?": int,
    "ablation?": {"protocol?": dict},
    "rouge?": {str: {"f1": untrusted.NUMBER}},
}


class Evaluated(NamedTuple):
    """What was written: figures with their step, the text with its title, both in a line."""

    report: dict[str, Any]
    text: str
    line: str


def tag(split: str, evaluator: Evaluator, whole: bool) -> str:
    """Under which figures of a split are logged: those of the whole apart, where training looks
    at a part of it, as another protocol makes another curve."""
    return f"eval/{split}_whole" if whole and evaluator.partial else f"eval/{split}"


def scalars(
    task: Task, evaluator: Evaluator, split: str, report: Mapping[str, Any], whole: bool
) -> dict[str, float]:
    """A report's figures by tag."""
    where = tag(split, evaluator, whole)
    return {f"{where}/{name}": value for name, value in task.figures(report).items()}


def write(
    workdir: Workdir,
    step: int,
    split: str,
    reading: EvaluationResult,
    tell: Callable[[Evaluated], object] = lambda found: None,
) -> Evaluated:
    """Writes a report: rows, text, picture, and last its figures, which say that all is done.

    Of several processes the first one does so.

    Args:
      tell: told before anything is written, which may fail.

    Raises:
      ConfigError: the directory cannot be written.
    """
    directory, name = workdir.evaluations / str(step), f"{split}{reading.name}"
    report = {"step": step, **reading.figures}
    text = f"{workdir.path}, step {step}, {split}: {reading.text}"
    evaluated = Evaluated(report, text, f"step {step}: {split} {reading.summary}")
    if not processes.is_first():
        return evaluated
    tell(evaluated)
    check_writable(directory, below=workdir.path)
    for what, rows in reading.rows.items():
        lines = "".join(json.dumps(finite(row)) + "\n" for row in rows)
        write_text(directory / f"{name}_{what}.jsonl", lines, below=workdir.path)
    write_text(directory / f"{name}.txt", text + "\n", below=workdir.path)
    if reading.draw:
        write_bytes(workdir.plots / f"{name}.png", reading.draw(), below=workdir.path)
    write_json(directory / f"{name}.json", finite(report), below=workdir.path)
    return evaluated


def read(path: Path) -> dict[str, Any]:
    """The report that `write` wrote.

    Raises:
      OSError, ValueError: it cannot be read, or is no report.
    """
    return untrusted.read_json(path, _REPORT)
