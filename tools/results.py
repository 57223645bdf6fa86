"""Collects the evaluations of sweeps in a small JSON file, prints their table, and draws the plot
of docs/results.md from such files.

python tools/results.py --sweep=runs/latex --name=LaTeX --json=docs/results/latex.json
python tools/results.py --table=docs/results/latex.json --baseline=Slide:7L
python tools/results.py --plot docs/results/*.json --output=docs/plots/recurrence_worth.png
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from results_plot import by_tokens, compared, plot

from brt.tasks.language_modeling.differences import Difference

SPLIT = "test"
LOSS = "train/bits_per_token"
PARTS = 16  # The training loss is kept as this number of means.


def collected(sweeps: Sequence[Path], name: str) -> dict[str, Any]:
    """Returns the runs of sweeps whose test split was evaluated, as JSON.

    Args:
      sweeps: the directories of the sweeps. Each run in them was evaluated by `brt.evaluate`, with
        `--ablate` or `--compare` if their figures are wanted.
      name: the name of the corpus, for the legend of the plot.
    """
    points = [point for sweep in sweeps for point in sorted(sweep.glob("*/point.json"))]
    runs = [_run(point.parent) for point in points]
    return {"name": name, "runs": [run for run in runs if run]}


def _run(directory: Path) -> dict[str, Any]:
    evaluations = sorted((directory / "evaluations").glob(f"*/{SPLIT}.json"), key=_step)
    if not evaluations:
        return {}
    file = evaluations[-1]
    point = json.loads((directory / "point.json").read_text())
    report = json.loads(file.read_text())
    compared = file.with_name(f"{SPLIT}_comparison.json")
    comparison = json.loads(compared.read_text()) if compared.exists() else {}
    training, model = point["config"]["Training"], point["config"]["Model"]
    counts = ("steps", "batch_size", "segment_length")
    provenance = json.loads((directory / "provenance.json").read_text())
    return {
        "name": point["name"].partition(",seed=")[0],
        "seed": training["seed"],
        "tokens": int(np.prod([training[name] for name in counts])),
        "width": model["model_dim"],
        "commit": provenance.get("git", {}).get("commit", "")[:8],
        "versions": provenance.get("versions", {}),
        "bits_per_byte": report["bits_per_byte"],
        "bits_per_token": report["bits_per_token"],
        "without_state": report.get("ablation", {}).get("bits_per_byte"),
        "training": _training(directory, training["batch_size"] * training["segment_length"]),
        "documents": _documents(file.with_name(f"{SPLIT}_documents.jsonl")),
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


def _training(directory: Path, tokens_per_step: int) -> list[tuple[int, float]]:
    """Returns the training loss in bits per token, as the means over up to 16 parts of the run.

    Returns:
      For each part, the number of training tokens at its end, and the loss.
    """
    file = directory / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    losses = [(row["step"], row[LOSS]) for row in rows if LOSS in row]
    parts = [part for part in np.array_split(np.asarray(losses), PARTS) if part.size]
    return [
        (int(part[-1, 0]) * tokens_per_step, round(float(part[:, 1].mean()), 5)) for part in parts
    ]


def table(results: dict[str, Any], baseline: str) -> str:
    """Returns the runs as a Markdown table, compared with the model `baseline`."""
    columns = (
        "model", "seed", "tokens", "bits per byte", "bits per token", f"compared with {baseline}",
        "without state",
    )  # fmt: skip
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for tokens, runs in by_tokens(results["runs"]).items():
        for run in runs:
            alone = [other for other in runs if other["seed"] == run["seed"]]
            found = compared(alone, run["name"], baseline)
            forgets = run["without_state"]
            change = "" if forgets is None else f"{forgets - run['bits_per_byte']:+.4f}"
            lines.append(
                f"| {run['name']} | {run['seed']} | {tokens:,} | {run['bits_per_byte']:.4f} | "
                f"{run['bits_per_token']:.4f} | {_shown(found)} | {change} |"
            )
    return "\n".join(lines)


def _shown(found: Difference | None) -> str:
    if found is None or not found.half_width:
        return ""
    low, high = found.value - found.half_width, found.value + found.half_width
    return f"{found.value:+.4f} ({low:+.4f} to {high:+.4f})"


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--sweep", type=Path, nargs="+", help="directories of sweeps to collect")
    flags.add_argument("--name", default="", help="the name of the corpus of --sweep")
    flags.add_argument("--json", type=Path, help="the file to write what --sweep collects to")
    flags.add_argument("--table", type=Path, help="print the table of such a file")
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
    if args.table:
        print(table(json.loads(args.table.read_text()), args.baseline))
    if args.plot:
        found = [json.loads(file.read_text()) for file in args.plot]
        args.output.write_bytes(plot(found, args.model, args.baseline))
    return 0


if __name__ == "__main__":
    sys.exit(main())
