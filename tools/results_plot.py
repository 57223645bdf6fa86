"""Draws what a model is worth compared with another one: during training, and by kind of token."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, MaxNLocator

from brt.drawing import png
from brt.tasks.language_modeling.differences import Difference, paired_difference

Run = Mapping[str, Any]


def compared(
    runs: Sequence[Run], name: str, baseline: str, unit: str = "bytes"
) -> Difference | None:
    """Returns the difference in bits per unit between two models, averaged over the seeds that both
    were trained with, with a confidence interval over documents.

    Args:
      runs: runs of models of the same width with the same number of training tokens.
      name, baseline: the names of the two models.
      unit: "bytes" or "tokens".

    Returns:
      The difference, negative if the model `name` is better; None without a common seed.
    """
    pairs = _pairs(runs, name, baseline)
    if not pairs:
        return None
    sizes = np.asarray([row[unit] for row in runs[0]["documents"]])
    ours, theirs = (
        np.mean([_nats(pair[i]) for pair in pairs], axis=0) for i in range(2)
    )  # fmt: skip
    return paired_difference(ours, theirs, sizes)


def by_size(runs: Sequence[Run]) -> dict[tuple[int, int], list[Run]]:
    """Returns the runs by the width of the model and the number of training tokens, in ascending
    order.
    """
    groups: dict[tuple[int, int], list[Run]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: (*_size(run), run["name"], run["seed"])):
        groups[_size(run)].append(run)
    return groups


def _size(run: Run) -> tuple[int, int]:
    return run["width"], run["tokens"]


def plot(all_results: Sequence[Mapping[str, Any]], name: str, baseline: str) -> bytes:
    """Returns a plot (PNG) with two panels: the difference of two models against training tokens,
    and by kind of token after the longest training.

    Args:
      all_results: the contents of files that tools/results.py wrote, one for each corpus.
      name: the name of the model.
      baseline: the name of the model that it is compared with.
    """
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    during, kinds = figure.subplots(1, 2, width_ratios=(1, 1.1))
    for panel in during, kinds:
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    for i, results in enumerate(all_results):
        _during_training(during, results, name, baseline, f"C{i}")
        _by_kind(kinds, results, name, baseline, i, len(all_results))
    during.axhline(0, color="0.3", linewidth=0.8)
    during.xaxis.set_major_formatter(EngFormatter(sep=""))
    during.set(
        title="Training loss (lines) and test loss (points)", xlabel="training tokens",
        ylabel=f"bits per token, {name} less {baseline}",
    )  # fmt: skip
    kinds.axvline(0, color="0.3", linewidth=0.8)
    kinds.invert_yaxis()
    kinds.xaxis.set_major_locator(MaxNLocator(5))
    kinds.set(
        title="Test tokens by kind, after the longest training",
        xlabel=f"bits per token, {name} less {baseline}",
    )
    figure.legend(*_legend(all_results), loc="outside lower center", ncols=4, frameon=False)
    return png(figure)


def _legend(all_results: Sequence[Mapping[str, Any]]) -> tuple[list[Patch], list[str]]:
    """Returns the handles and the labels of a legend with the color of each corpus."""
    handles = [Patch(color=f"C{i}") for i in range(len(all_results))]
    return handles, [results["name"] for results in all_results]


def _during_training(
    axes: Axes, results: Mapping[str, Any], name: str, baseline: str, color: str
) -> None:
    """Draws the difference of the training losses of the longest runs, and of all test losses. The
    points of models that are narrower than the widest one are squares.
    """
    groups = by_size(results["runs"])
    widest = max(width for width, _ in groups)
    for (width, tokens), runs in groups.items():
        if (found := compared(runs, name, baseline, "tokens")) is None:
            continue
        axes.errorbar(
            [tokens], [found.value], yerr=[found.half_width or 0.0], markersize=5, capsize=3,
            fmt="o" if width == widest else "s", color=color,
        )  # fmt: skip
        if width < widest:
            axes.annotate(
                f"width {width}", (tokens, found.value), xytext=(8, -3), textcoords="offset points",
                color=color, fontsize="small",
            )  # fmt: skip
    everything = by_size([*results["runs"], *results.get("training_only", ())])
    found_pairs = {size: _pairs(runs, name, baseline) for size, runs in everything.items()}
    pairs = next((found_pairs[n] for n in sorted(found_pairs, reverse=True) if found_pairs[n]), [])
    if curves := [_difference_of_losses(*pair) for pair in pairs]:
        length = min(len(curve) for curve in curves)
        mean = np.mean([curve[:length] for curve in curves], axis=0)
        axes.plot(mean[:, 0], mean[:, 1], color=color, linewidth=1.2)


def _difference_of_losses(ours: Run, theirs: Run) -> np.ndarray:
    """Returns the difference of two training losses in bits per token, as far as both runs went.

    Returns:
      float64 [parts, 2]: for each part of the runs, its last training token and the difference.
    """
    length = min(len(ours["training"]), len(theirs["training"]))
    losses = [np.asarray(run["training"])[:length] for run in (ours, theirs)]
    return np.stack([losses[0][:, 0], losses[0][:, 1] - losses[1][:, 1]], axis=1)


def _by_kind(
    axes: Axes, results: Mapping[str, Any], name: str, baseline: str, index: int, count: int
) -> None:
    """Draws a bar for each kind of token, with its interval, for the longest run that was compared
    with the baseline.
    """
    runs = [
        run for run in results["runs"]
        if run["name"] == name and (run["comparison"] or {}).get("with", "").startswith(
            baseline.replace(":", "-")
        )
    ]  # fmt: skip
    if not runs:
        return
    run = max(runs, key=_size)
    classes = run["comparison"]["classes"]
    places = np.arange(len(classes)) + (index - (count - 1) / 2) * 0.8 / count
    axes.barh(
        places, [one["difference"] for one in classes], height=0.8 / count, color=f"C{index}",
        xerr=[one["difference_95"] for one in classes], alpha=0.85,
        error_kw={"elinewidth": 1, "capsize": 2, "ecolor": "0.35"},
    )  # fmt: skip
    axes.set_yticks(range(len(classes)), [one["class"] for one in classes])


def _pairs(runs: Sequence[Run], name: str, baseline: str) -> list[tuple[Run, Run]]:
    """Returns the runs of two models with the same seed, for each seed that both have."""
    by_seed: dict[int, dict[str, Run]] = defaultdict(dict)
    for run in runs:
        by_seed[run["seed"]][run["name"]] = run
    return [
        (own[name], own[baseline]) for own in by_seed.values() if name in own and baseline in own
    ]


def _nats(run: Run) -> np.ndarray:
    """Returns the nats of each document, float64 [documents]."""
    return np.asarray([row["bits"] for row in run["documents"]]) * np.log(2)
