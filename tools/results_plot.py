"""Draws what a model is worth compared with another one: during training, and by kind of token."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, MaxNLocator, NullLocator

from brt.drawing import png
from brt.tasks.differences import Difference, difference_of_runs

Run = Mapping[str, Any]
Size = tuple[int, int, int]  # width of the model, tokens of a step, training tokens


def compared(
    runs: Sequence[Run], name: str, baseline: str, unit: str = "bytes"
) -> Difference | None:
    """Returns the difference in bits per unit between two models, averaged over the seeds that both
    were trained with, with a confidence interval.

    With one seed, the interval is over documents alone, and says nothing about other trainings of
    the same models; with several seeds, it is over both (`difference_of_runs`).

    Args:
      runs: runs of models of the same width with the same number of training tokens and of tokens
        per step.
      name, baseline: the names of the two models.
      unit: "bytes" or "tokens".

    Returns:
      The difference, negative if the model `name` is better; None without a common seed.
    """
    pairs = _pairs(runs, name, baseline)
    if not pairs:
        return None
    sizes = np.asarray([row[unit] for row in runs[0]["documents"]])
    ours, theirs = (np.stack([_nats(pair[i]) for pair in pairs]) for i in range(2))
    return difference_of_runs(ours, theirs, sizes)


def by_size(runs: Sequence[Run]) -> dict[Size, list[Run]]:
    """Returns the runs by the width of the model, the number of tokens of a step, and the number of
    training tokens, in ascending order.
    """
    groups: dict[Size, list[Run]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: (*_size(run), run["name"], run["seed"])):
        groups[_size(run)].append(run)
    return groups


def _size(run: Run) -> Size:
    return run["width"], run["tokens_per_step"], run["tokens"]


def plot(all_results: Sequence[Mapping[str, Any]], name: str, baseline: str) -> bytes:
    """Returns a plot (PNG) with two panels: the difference of two models against training tokens,
    and by kind of token after the training that was repeated with the most seeds.

    Args:
      all_results: the contents of files that tools/results.py wrote, one for each corpus.
      name: the name of the model.
      baseline: the name of the model that it is compared with.
    """
    figure = Figure(figsize=(10.5, 4.4), layout="constrained")
    during, kinds = figure.subplots(1, 2, width_ratios=(1.2, 1))
    for panel in during, kinds:
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    tokens = {
        _by_kind(kinds, results, name, baseline, i, len(all_results))
        for i, results in enumerate(all_results)
    } - {0}
    for i, results in enumerate(all_results):
        _during_training(during, results, name, baseline, f"C{i}")
    during.axhline(0, color="0.3", linewidth=0.8)
    sizes = {run["tokens"] for results in all_results for run in results["runs"]}
    during.set_xscale("log")
    during.set_xticks(sorted(sizes), [_in_words(size) for size in sorted(sizes)])
    during.xaxis.set_minor_locator(NullLocator())
    during.set(
        title="Training loss (lines) and test loss (points)", xlabel="training tokens",
        ylabel=f"bits per token, {name} less {baseline}",
    )  # fmt: skip
    kinds.axvline(0, color="0.3", linewidth=0.8)
    kinds.invert_yaxis()
    kinds.xaxis.set_major_locator(MaxNLocator(5))
    after = " and ".join(_in_words(count) for count in sorted(tokens))
    kinds.set(
        title=f"Kinds of test tokens, after {after}",
        xlabel=f"bits per token, {name} less {baseline}",
    )
    figure.legend(*_legend(all_results), loc="outside lower center", ncols=4, frameon=False)
    return png(figure)


def _in_words(count: int) -> str:
    return EngFormatter(places=0, sep="")(count)


def _legend(all_results: Sequence[Mapping[str, Any]]) -> tuple[list[Patch], list[str]]:
    """Returns the handles and the labels of a legend with the color of each corpus."""
    handles = [Patch(color=f"C{i}") for i in range(len(all_results))]
    return handles, [results["name"] for results in all_results]


def _during_training(
    axes: Axes, results: Mapping[str, Any], name: str, baseline: str, color: str
) -> None:
    """Draws the difference of the training losses of the longest runs, and of all test losses.
    Models that are narrower than the widest one, and runs with larger batches than the smallest,
    have points of their own and no line.
    """
    groups = by_size([*results["runs"], *results.get("training_only", ())])
    widest, least = max(size[0] for size in groups), min(size[1] for size in groups)
    for (width, per_step, tokens), runs in by_size(results["runs"]).items():
        if (found := compared(runs, name, baseline, "tokens")) is None:
            continue
        place, marker = float(tokens), "o"
        if (width, per_step) != (widest, least):
            marker, mark = ("s", f"width {width}") if width < widest else ("D", "more lanes")
            place *= 1.07  # beside the point of the usual model
            axes.annotate(
                mark, (place, found.value), xytext=(8, -3), textcoords="offset points",
                color=color, fontsize="small",
            )  # fmt: skip
        axes.errorbar(
            [place], [found.value], yerr=[found.half_width or 0.0], markersize=5, capsize=3,
            fmt=marker, color=color,
        )  # fmt: skip
    pairs = [
        _pairs(runs, name, baseline) for size, runs in sorted(groups.items(), reverse=True)
        if size[:2] == (widest, least)
    ]  # fmt: skip
    longest = next((own for own in pairs if own), [])
    if curves := [_difference_of_losses(*pair) for pair in longest]:
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
) -> int:
    """Draws a bar for each kind of token, averaged over the seeds of the training that was repeated
    with the most seeds (the longest, if several were), and a point for each seed.

    Returns:
      The number of training tokens; 0 if no run was compared with the baseline.
    """
    compared_runs = [
        run for run in results["runs"]
        if run["name"] == name and (run["comparison"] or {}).get("with", "").startswith(
            baseline.replace(":", "-")
        )
    ]  # fmt: skip
    if not compared_runs:
        return 0
    groups = by_size(compared_runs)
    size = max(groups, key=lambda size: (len(groups[size]), size))
    seeds = [run["comparison"]["classes"] for run in groups[size]]
    differences = np.asarray([[one["difference"] for one in classes] for classes in seeds])
    places = np.arange(len(seeds[0])) + (index - (count - 1) / 2) * 0.8 / count
    axes.barh(places, differences.mean(axis=0), height=0.8 / count, color=f"C{index}", alpha=0.6)
    for seed in differences:
        axes.plot(seed, places, ".", color="0.25", markersize=4)
    axes.set_yticks(range(len(seeds[0])), [one["class"] for one in seeds[0]])
    return size[-1]


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
