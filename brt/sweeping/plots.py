"""Draws the plots of a sweep: results against step time, results as bars, and training curves.

The plotted metric is the error rate or score of the task if it has one, otherwise bits per byte.
The runs of a sweep are called points. A group consists of the points that differ only in their
seed.
"""

from collections.abc import Sequence
from math import nan
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, ScalarFormatter

from brt.drawing import curve, distance_plot, new_figure, png, smoothed
from brt.formatting import plot_label
from brt.sweeping.results import Group, Row, reference, same_step, table_metrics
from brt.tasks.report import BITS_PER_BYTE, EXACT_ANSWERS, Metric
from brt.training.workdir import check_writable, write_bytes

_TRADE_OFF, _BARS, _CURVES = "bits_against_step_time.png", "bits.png", "training_curves.png"
_CONVERGENCE, _DISTANCES = "convergence.png", "answers_against_distance.png"
_LEARNED = "answers_learned.png"
_BAR, _SEED = "#4c78a8", "#222222"
_LEGEND_LINES = 24
_MOST_PANELS = 4  # A plot with several panels has at most this many side by side.


def primary_metric(groups: Sequence[Group]) -> Metric:
    """Returns the metric to plot: the first in the report's table, or bits per byte without any."""
    metrics = table_metrics([row for g in groups for row in g.rows])
    return metrics[0] if metrics else BITS_PER_BYTE


def _seeds(metric: Metric, group: Group) -> list[float]:
    return [row.metrics[metric.name] for row in group.rows if metric.name in row.metrics]


def draw(groups: Sequence[Group], directory: Path, baseline: str = "") -> list[str]:
    """Draws all plots for which there are results, and returns the names of the PNG files."""
    groups = [g._replace(name=plot_label(g.name)) for g in groups]
    baseline = plot_label(baseline)
    metric = primary_metric(groups)
    done = [g for g in groups if metric.name in g.metrics]
    figures = {}
    if any(g.step_seconds for g in done):
        figures[_TRADE_OFF] = trade_off([g for g in done if g.step_seconds], metric)
    if done:
        figures[_BARS] = bars(done, metric)
    begun = [g for g in groups if any(row.records for row in g.rows)]
    if begun:
        figures[_CURVES] = training_curves(begun)
    if any(g.answers for g in done):
        lines = {g.name: g.answers for g in done if g.answers}
        figures[_DISTANCES] = distance_plot(lines, EXACT_ANSWERS.title)
    if metric != BITS_PER_BYTE and any(_validated(row, metric) for g in begun for row in g.rows):
        figures[_CONVERGENCE] = convergence(begun, metric)
    if any(_validated(row, EXACT_ANSWERS) for g in begun for row in g.rows):
        figures[_LEARNED] = answers_learned(begun, reference(begun, baseline))
    check_writable(directory, below=directory.parent)
    for name, figure in figures.items():
        write_bytes(directory / name, png(figure), below=directory.parent)
    return list(figures)


def trade_off(groups: Sequence[Group], metric: Metric = BITS_PER_BYTE) -> Figure:
    """Returns a plot of a metric against the time of a training step, with a marker for each group.

    If `groups` read different numbers of tokens per step, the time per 1,000 tokens is shown.
    """
    figure, (axes,) = new_figure(1, height=5.5)
    steps = same_step(groups)
    for color, g in zip(_colors(len(groups)), groups, strict=True):
        seeds, mean, milliseconds = (
            _seeds(metric, g),
            g.metrics[metric.name],
            1000 * (g.step_seconds or nan) * (1 if steps else 1000 / (g.tokens_per_step or nan)),
        )
        axes.errorbar(
            milliseconds, mean, fmt="o", color=color, capsize=3,
            yerr=[[mean - min(seeds)], [max(seeds) - mean]],
        )  # fmt: skip
        axes.annotate(
            g.name, (milliseconds, mean), xytext=(6, 4), textcoords="offset points",
            fontsize=8, color=color,
        )  # fmt: skip
    axes.margins(0.15)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set(
        xlabel=f"milliseconds of {'a training step' if steps else 'training on 1,000 tokens'}",
        ylabel=f"{metric.title}, held-out",
        title="What it costs (bars: seeds)",
    )
    return figure


def bars(groups: Sequence[Group], metric: Metric = BITS_PER_BYTE) -> Figure:
    """Returns a plot with a bar for the mean of each group's metric, and a dot for each run."""
    figure, (axes,) = new_figure(1, height=1.6 + 0.35 * len(groups))
    places = range(len(groups))
    axes.barh(places, [g.metrics[metric.name] for g in groups], color=_BAR, alpha=0.6, height=0.65)
    for place, g in zip(places, groups, strict=True):
        seeds = _seeds(metric, g)
        axes.plot(seeds, [place] * len(seeds), "o", color=_SEED, markersize=4)
    every = [value for g in groups for value in _seeds(metric, g)]
    low, high = min(every), max(every)
    margin = 0.15 * (high - low) or 0.1
    axes.set_yticks(places, [g.name for g in groups])
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(ScalarFormatter(useOffset=False))
    axes.set(
        xlabel=f"{metric.title}, held-out (dots: seeds; the axis does not begin at 0)",
        xlim=(max(low - 3 * margin, 0), high + margin),
    )
    return figure


def training_curves(groups: Sequence[Group]) -> Figure:
    """Returns a plot of the smoothed bits per token against the number of training tokens."""
    # Every run has a line, and all lines of a group have the same color.
    figure, (axes,) = new_figure(1, height=5.5)
    tails = []
    for color, g in zip(_colors(len(groups)), groups, strict=True):
        label: str | None = g.name
        for row in g.rows:
            tokens, bits = curve(row.records, "train/bits_per_token")
            if not bits.size:
                continue
            smooth = smoothed(bits)
            axes.plot(tokens, smooth, color=color, linewidth=1.2, alpha=0.8, label=label)
            # The first tenth of a curve does not determine the limits of the axis, because its
            # large values would hide the differences between the curves in the rest.
            tails.append(smooth[len(smooth) // 10 :])
            label = None
    if tails:
        low, high = min(t.min() for t in tails), max(t.max() for t in tails)
        margin = 0.06 * (high - low) or 0.1
        axes.set_ylim(low - margin, high + margin)
        _legend(axes, len(groups))
    axes.set(xlabel="training tokens", ylabel="bits per token", title="Training (smoothed)")
    return figure


def convergence(groups: Sequence[Group], metric: Metric) -> Figure:
    """Returns a plot of a validation metric against the minutes of training without compilation."""
    figure, (axes,) = new_figure(1, height=5.5)
    for color, g in zip(_colors(len(groups)), groups, strict=True):
        label: str | None = g.name
        for row in g.rows:
            values = _validated(row, metric)
            minutes = [step * (row.step_seconds or 0) / 60 for step in values]
            axes.plot(minutes, list(values.values()), color=color, linewidth=1.2, label=label)
            label = None
    _legend(axes, len(groups))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set(
        xlabel="minutes of training, without compilation", ylabel=f"{metric.title}, validation"
    )
    return figure


def answers_learned(groups: Sequence[Group], baseline: Group) -> Figure:
    """Returns a plot of the share of exact answers during training.

    The documents of synthetic memory tasks contain answers, which can only be predicted from what
    the document said before. An answer is exact if the model predicted each of its tokens as the
    most likely one. The plot shows the percentage of exact answers on the validation split against
    the number of training tokens. Every group except the baseline has a panel with a line for each
    run, and every panel shows the runs of the baseline in grey.
    """
    others = [g for g in groups if g is not baseline] or [baseline]
    across = min(_MOST_PANELS, len(others))
    down = -(-len(others) // across)
    figure = Figure(figsize=(3 * across, 2.4 * down), layout="constrained")
    panels = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False).flat
    for axes in panels[len(others) :]:
        axes.set_axis_off()
    for number, (axes, g) in enumerate(zip(panels, others, strict=False)):
        # Only the lowest panel of each column has labels below its axis.
        axes.tick_params(labelbottom=number + across >= len(others))
        for one, color in ((baseline, "#aaaaaa"), (g, _BAR)):
            for row in one.rows:
                axes.plot(*curve(row.records, f"eval/validation/{EXACT_ANSWERS.name}"), color=color)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_title(g.name, fontsize=9)
        axes.grid(alpha=0.25)
    figure.supxlabel("training tokens", fontsize=9)
    figure.supylabel(f"{EXACT_ANSWERS.title} (grey: {baseline.name})", fontsize=9)
    return figure


def _validated(row: Row, metric: Metric) -> dict[int, float]:
    """Returns the values of a metric on the validation split, by step."""
    tag = f"eval/validation/{metric.name}"
    return {record["step"]: record[tag] for record in row.records if tag in record}


def _legend(axes: Axes, groups: int) -> None:
    if groups <= _LEGEND_LINES:
        axes.legend(frameon=False, fontsize=8, ncols=1 + groups // 9)


def _colors(count: int) -> list[tuple[float, ...]]:
    table = matplotlib.colormaps["tab10" if count <= 10 else "tab20" if count <= 20 else "turbo"]
    if count <= 20:
        return [table(i) for i in range(count)]
    return [table(i / (count - 1)) for i in range(count)]
