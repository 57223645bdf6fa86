"""Draws the plots of a run from metrics.jsonl."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from brt.drawing import curve, logarithmic, new_figure, png, smoothed
from brt.errors import DataError
from brt.tasks.report import Metric
from brt.training.metrics import read_metrics
from brt.training.workdir import Workdir, check_writable, write_bytes

# A baseline is the name of a simpler method, such as the compression program xz, and the value of
# the metric that this method reaches on the held-out data.
Baseline = tuple[str, float]
_TRAIN, _HELD_OUT, _BASELINE = "#4c78a8", ("#e4572e", "#2a9d62", "#a05195"), "#767676"


def draw(
    workdir: Workdir,
    metric: Metric,
    *,
    units_per_token: float,
    baseline: Baseline | None = None,
) -> list[Path]:
    """Draws the curves of a run as PNG files in plots/, and returns the paths of the files.

    Training logs bits per token, which are divided by `units_per_token`, the number of units of the
    metric (such as bytes) per training token. The baseline is a horizontal line.
    """
    records = read_metrics(workdir.metrics)
    if not any(record.get("train/bits_per_token") is not None for record in records):
        raise DataError(f"{workdir.metrics} records no training step, so there is nothing to draw")
    bits = _bits_figure(records, metric, units_per_token, baseline)
    figures = {f"{metric.name}.png": bits, "optimization.png": _optimization_figure(records)}
    check_writable(workdir.plots, below=workdir.path)
    for name, figure in figures.items():
        write_bytes(workdir.plots / name, png(figure), below=workdir.path)
    return [workdir.plots / name for name in figures]


def _bits_figure(
    records: Sequence[Mapping[str, Any]],
    metric: Metric,
    units_per_token: float,
    baseline: Baseline | None,
) -> Figure:
    figure, (axes,) = new_figure(1)
    tokens, train = curve(records, "train/bits_per_token")
    train = train / units_per_token
    smooth = smoothed(train)
    axes.plot(tokens, train, color=_TRAIN, alpha=0.25, linewidth=1)
    axes.plot(tokens, smooth, color=_TRAIN, linewidth=2, label="train (smoothed)")
    # The first twentieth of each curve does not determine the limits of the axis, because the large
    # losses at the beginning would compress the rest of the curve.
    shown = [smooth[len(smooth) // 20 :]]
    # The metrics of a whole split and of a part of the split have different names, so there may be
    # two curves.
    splits = sorted(
        {name for record in records for name in record if name.endswith(f"/{metric.name}")}
    )
    for number, name in enumerate(splits):
        tokens, values = curve(records, name)
        color = _HELD_OUT[number % len(_HELD_OUT)]
        split = name.split("/")[1].replace("_whole", ", whole")
        axes.plot(tokens, values, "o-", color=color, markersize=4, label=split)
        shown.append(values[len(values) // 20 :])
    if baseline:
        name, value = baseline
        label = f"{name} of the whole held-out text ({value:.2f})"
        axes.axhline(value, color=_BASELINE, linestyle="--", label=label)
        shown.append(np.array([value]))
    low, high = np.min(np.concatenate(shown)), np.max(np.concatenate(shown))
    margin = 0.06 * (high - low) or 0.1
    axes.set(
        xlabel="training tokens",
        ylabel=metric.title,
        title="Training data and held-out data",
        ylim=(low - margin, high + margin),
    )
    axes.legend(frameon=False)
    return figure


def _optimization_figure(records: Sequence[Mapping[str, Any]]) -> Figure:
    figure, (upper, lower) = new_figure(2)
    upper.plot(*curve(records, "train/learning_rate"), color=_TRAIN, linewidth=2)
    upper.set(ylabel="learning rate", title="Learning rate and gradient norm")
    tokens, norms = curve(records, "train/gradient_norm")
    lower.plot(tokens, norms, color=_TRAIN, alpha=0.25, linewidth=1)
    lower.plot(tokens, smoothed(norms), color=_TRAIN, linewidth=2)
    lower.set(xlabel="training tokens", ylabel="gradient norm")
    logarithmic(lower, norms)
    return figure
