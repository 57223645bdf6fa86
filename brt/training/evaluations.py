"""What evaluations leave in a workdir: `evaluations/<step>/<split>*`."""

import json
from typing import Any, NamedTuple

from brt.tasks.report import Reading
from brt.training.workdir import Workdir, write_json, write_text


class Evaluated(NamedTuple):
    """What was written: figures with their step, the text with its title, both in a line."""

    report: dict[str, Any]
    text: str
    line: str


def write(workdir: Workdir, step: int, split: str, reading: Reading) -> Evaluated:
    """Writes a report: its rows, its text, and last its figures, which say that all is done.

    Raises:
      ConfigError: the directory cannot be written.
    """
    directory, name = workdir.evaluations / str(step), f"{split}{reading.name}"
    directory.mkdir(parents=True, exist_ok=True)
    report = {"step": step, **reading.figures}
    text = f"{workdir.path}, step {step}, {split}: {reading.text}"
    for what, rows in reading.rows.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        write_text(directory / f"{name}_{what}.jsonl", lines)
    write_text(directory / f"{name}.txt", text + "\n")
    write_json(directory / f"{name}.json", report)
    return Evaluated(report, text, f"step {step}: {split} {reading.headline}")
