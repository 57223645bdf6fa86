"""Collects the evaluations of sweeps in a small JSON file, prints their table, and draws the plot
of docs/results.md from such files.

python tools/results.py --sweep=runs/latex --name=LaTeX --json=docs/results/latex.json
python tools/results.py --table=docs/results/latex.json --baseline=Slide:7L
python tools/results.py --plot docs/results/*.json --baseline=Slide:7L --output=docs/plots/worth.png
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from brt.drawing import new_figure, png
from brt.tasks.language_modeling.differences import Difference, paired_difference

SPLIT = "test"


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


def compared(runs: Sequence[dict[str, Any]], name: str, baseline: str) -> Difference | None:
    """Returns the difference in bits per byte between two models, averaged over the seeds that both
    were trained with, with a confidence interval over documents.

    Args:
      runs: runs with the same number of training tokens.
      name, baseline: the names of the two models.

    Returns:
      The difference, negative if the model `name` is better; None without a common seed.
    """
    by_seed: dict[int, dict[str, np.ndarray]] = defaultdict(dict)
    sizes = np.asarray([row["bytes"] for row in runs[0]["documents"]])
    for run in runs:
        bits = np.asarray([row["bits"] for row in run["documents"]])
        by_seed[run["seed"]][run["name"]] = bits * np.log(2)
    pairs = [own for own in by_seed.values() if name in own and baseline in own]
    if not pairs:
        return None
    ours, theirs = (np.mean([own[key] for own in pairs], axis=0) for key in (name, baseline))
    return paired_difference(ours, theirs, sizes)


def table(results: dict[str, Any], baseline: str) -> str:
    """Returns the runs as a Markdown table, compared with the model `baseline`."""
    columns = (
        "model", "seed", "tokens", "bits per byte", "bits per token", f"compared with {baseline}",
        "without state",
    )  # fmt: skip
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for tokens, runs in _by_tokens(results).items():
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


def _by_tokens(results: dict[str, Any]) -> dict[int, list[dict[str, Any]]]:
    groups: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for run in sorted(results["runs"], key=lambda run: (run["tokens"], run["name"], run["seed"])):
        groups[run["tokens"]].append(run)
    return groups


def plot(all_results: Sequence[dict[str, Any]], baseline: str) -> bytes:
    """Returns a plot (PNG) of each model's difference to the baseline against training tokens.

    Args:
      all_results: the contents of files that `collected` wrote, one for each corpus.
      baseline: the name of the model that others are compared with.
    """
    figure, (axes,) = new_figure(1)
    for results in all_results:
        groups = _by_tokens(results)
        names = {run["name"] for runs in groups.values() for run in runs} - {baseline}
        for name in sorted(names):
            found = {n: compared(runs, name, baseline) for n, runs in groups.items()}
            points = {n: one for n, one in found.items() if one is not None}
            axes.errorbar(
                list(points), [one.value for one in points.values()],
                yerr=[one.half_width or 0.0 for one in points.values()], fmt="o-", markersize=4,
                capsize=3, label=f"{name}, {results['name']}",
            )  # fmt: skip
    axes.axhline(0, color="0.3", linewidth=0.8)
    axes.set(xlabel="training tokens", ylabel=f"bits per byte, compared with {baseline}")
    axes.legend(frameon=False)
    return png(figure)


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--sweep", type=Path, nargs="+", help="directories of sweeps to collect")
    flags.add_argument("--name", default="", help="the name of the corpus of --sweep")
    flags.add_argument("--json", type=Path, help="the file to write what --sweep collects to")
    flags.add_argument("--table", type=Path, help="print the table of such a file")
    flags.add_argument("--plot", type=Path, nargs="+", help="draw the plot of such files")
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
        args.output.write_bytes(plot(found, args.baseline))
    return 0


if __name__ == "__main__":
    sys.exit(main())
