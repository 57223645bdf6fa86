"""Collects the evaluations of sweeps in a small JSON file, of which tools/tables.py writes tables,
and draws the plot of docs/results.md from such files.

python tools/results.py --sweep=runs/latex --name=LaTeX --json=docs/results/latex.json
python tools/results.py --plot docs/results/*.json --output=docs/plots/recurrence_worth.png
"""

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from results_plot import plot

SPLIT = "test"
LOSS = "train/bits_per_token"
PARTS = 16  # The training loss is kept as this number of means.


def collected(sweeps: Sequence[Path], name: str) -> dict[str, Any]:
    """Returns, as JSON, the runs of sweeps whose test split was evaluated, and the training losses
    of the other runs, such as those that were stopped.

    Args:
      sweeps: the directories of the sweeps. Each run in them was evaluated by `brt.evaluate`, with
        `--ablate` or `--compare` if their figures are wanted.
      name: the name of the corpus, for the legend of the plot.
    """
    points = [point for sweep in sweeps for point in sorted(sweep.glob("*/point.json"))]
    started = [point.parent for point in points if point.with_name("provenance.json").exists()]
    runs = [_run(directory) for directory in started]
    return {
        "name": name,
        "runs": [run for run in runs if "bits_per_byte" in run],
        "training_only": [run for run in runs if "bits_per_byte" not in run and run["training"]],
    }


def _run(directory: Path) -> dict[str, Any]:
    point = json.loads((directory / "point.json").read_text())
    training, model = point["config"]["Training"], point["config"]["Model"]
    tokens_per_step = training["batch_size"] * training["segment_length"]
    provenance = json.loads((directory / "provenance.json").read_text())
    run = {
        "name": point["name"].partition(",seed=")[0],
        "seed": training["seed"],
        "tokens": training["steps"] * tokens_per_step,
        "tokens_per_step": tokens_per_step,
        "width": model["model_dim"],
        "learning_rate": point["config"]["Optimizer"]["learning_rate"],
        "commit": provenance.get("git", {}).get("commit", "")[:8],
        "versions": provenance.get("versions", {}),
        "devices": provenance.get("devices", []),
        "training": _training(directory, training["steps"], tokens_per_step),
    }
    return run | _evaluation(directory)


def _evaluation(directory: Path) -> dict[str, Any]:
    """Returns the results of the newest evaluation of a run; {} if there is none."""
    evaluations = sorted((directory / "evaluations").glob(f"*/{SPLIT}.json"), key=_step)
    if not evaluations:
        return {}
    file = evaluations[-1]
    report = json.loads(file.read_text())
    compared = file.with_name(f"{SPLIT}_comparison.json")
    comparison = json.loads(compared.read_text()) if compared.exists() else {}
    return {
        "bits_per_byte": report["bits_per_byte"],
        "bits_per_token": report["bits_per_token"],
        "without_state": report.get("ablation", {}).get("bits_per_byte"),
        "answers": report.get("answers"),
        "documents": None
        if report.get("answers")
        else _documents(file.with_name(f"{SPLIT}_documents.jsonl")),
        "comparison": {
            "with": Path(comparison["other"]["run"]).name,
            "classes": comparison["classes"],
            "positions": comparison.get("positions", []),
        } if comparison else None,
    }  # fmt: skip


def _step(file: Path) -> int:
    return int(file.parent.name)


def _documents(file: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [
        {"document": Path(row["document"]).name, **{k: row[k] for k in ("bits", "bytes", "tokens")}}
        for row in rows
    ]


def _training(directory: Path, steps: int, tokens_per_step: int) -> list[tuple[int, float]]:
    """Returns the training loss in bits per token, as the mean of each sixteenth of a run.

    Args:
      directory: the directory of the run.
      steps: the number of steps that the run was started for.
      tokens_per_step: the number of tokens of a step.

    Returns:
      For each part that the run completed, the number of training tokens at its end, and the loss.
    """
    file = directory / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    losses = np.asarray([(row["step"], row[LOSS]) for row in rows if LOSS in row]).reshape(-1, 2)
    ends = [steps * part // PARTS for part in range(PARTS + 1)]
    parts = []
    for begin, end in pairwise(ends):
        part = losses[(losses[:, 0] > begin) & (losses[:, 0] <= end), 1]
        if part.size and losses[-1, 0] >= end:
            parts.append((end * tokens_per_step, round(float(part.mean()), 5)))
    return parts


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--sweep", type=Path, nargs="+", help="directories of sweeps to collect")
    flags.add_argument("--name", default="", help="the name of the corpus of --sweep")
    flags.add_argument("--json", type=Path, help="the file to write what --sweep collects to")
    flags.add_argument("--plot", type=Path, nargs="+", help="draw the plot of such files")
    flags.add_argument("--model", default="Rec:fixed:skip", help="the model that --plot shows")
    flags.add_argument("--baseline", default="Slide:7L", help="the model to compare with")
    flags.add_argument("--output", type=Path, help="the PNG file to draw to")
    return flags


def main() -> int:
    args = parser().parse_args()
    if args.sweep:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(collected(args.sweep, args.name), indent=1) + "\n")
    if args.plot:
        found = [json.loads(file.read_text()) for file in args.plot]
        args.output.write_bytes(plot(found, args.model, args.baseline))
    return 0


if __name__ == "__main__":
    sys.exit(main())
