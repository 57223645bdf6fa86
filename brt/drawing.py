"""Creates plots in one style, and draws the metrics of runs."""

import io
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, NullFormatter, StrMethodFormatter

# Matplotlib logs that it builds its font cache. The message is hidden, because it does not concern
# users of brt.
logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)

_COLORS = 10  # Matplotlib has this number of colours; further lines need another style.
_MOST_INSIDE = 5  # A legend of at most this many lines fits inside the axes.


def new_figure(rows: int, height: float | None = None) -> tuple[Figure, list[Axes]]:
    """Returns a figure, and its panels, which stand below each other and share their x axis.

    If `height` (in inches) is None, it is computed from the number of panels.
    """
    figure = Figure(figsize=(8, height or 3.2 + 1.6 * rows), layout="constrained")
    axes = list(figure.subplots(rows, sharex=True, squeeze=False)[:, 0])
    for panel in axes:
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        panel.xaxis.set_major_formatter(EngFormatter(sep=""))
    return figure, axes


def window_plot(values: Mapping[int, float], ylabel: str) -> Figure:
    """Returns a plot of a metric against the window in tokens, on a logarithmic axis of windows."""
    figure, (axes,) = new_figure(1)
    axes.plot(list(values), list(values.values()), "o-", markersize=4)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(values), [f"{window:,}" for window in values])
    axes.set(title="What context is worth", xlabel="window, tokens", ylabel=ylabel)
    return figure


def class_plot(values: Mapping[str, tuple[float, float | None]], xlabel: str) -> Figure:
    """Returns a plot with a horizontal bar for each class of tokens, the first class at the top.

    Each value has the length of a bar and half the width of its confidence interval, or None if
    there is no interval.
    """
    figure, (axes,) = new_figure(1)
    for name, (length, half) in values.items():
        axes.barh(name, length, xerr=half, color="tab:blue", ecolor="0.3", capsize=3)
    axes.axvline(0, color="0.3", linewidth=0.8)
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:.2g}"))
    axes.set_xlabel(xlabel)
    return figure


def distance_plot(lines: Mapping[str, Mapping[int, float]], ylabel: str) -> Figure:
    """Returns a plot of a percentage against a distance in windows, with a line for each name.

    The legend lists the lines in descending order of their sums.
    """
    figure, (axes,) = new_figure(1)
    best_first = sorted(lines.items(), key=lambda line: -sum(line[1].values()))
    for number, (name, values) in enumerate(best_first):
        style = "o-" if number < _COLORS else "s--"
        axes.plot(list(values), list(values.values()), style, markersize=4, label=name)
    axes.set_xscale("log", base=2)
    ticks = sorted({windows for values in lines.values() for windows in values})
    axes.set_xticks(ticks, list(map(str, ticks)))
    axes.set(
        title="What is remembered", xlabel="up to so many windows before", ylabel=ylabel,
        ylim=(-3, 103),
    )  # fmt: skip
    if len(lines) > _MOST_INSIDE:
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    elif len(lines) > 1:
        axes.legend(frameon=False)
    return figure


def png(figure: Figure) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, dpi=150, format="png")
    return content.getvalue()


def logarithmic(axes: Axes, values: Sequence[float] | np.ndarray) -> None:
    """Makes the y axis of a plot logarithmic if all `values` that it shows are above 0."""
    if not len(values) or min(values) <= 0:
        return
    axes.set_yscale("log")
    plain = StrMethodFormatter("{x:g}")
    axes.yaxis.set_major_formatter(plain)
    # Minor ticks are labelled only if all values are within a decade, where major ticks may be
    # missing. Over several decades their labels would be crowded.
    axes.yaxis.set_minor_formatter(plain if max(values) < 10 * min(values) else NullFormatter())


def curve(records: Sequence[Mapping[str, Any]], tag: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns a metric's curve as two arrays [records]: training tokens, and the metric.

    Records without the metric are left out. If a record has no number of tokens, the number is
    interpolated.
    """
    counted = [r for r in records if r.get("data/tokens") is not None]
    tagged = [r for r in records if r.get(tag) is not None]
    tokens = np.interp(
        [r["step"] for r in tagged],
        [0, *(r["step"] for r in counted)],
        [0, *(r["data/tokens"] for r in counted)],
    )
    return tokens, np.array([r[tag] for r in tagged], float)


def smoothed(values: np.ndarray) -> np.ndarray:
    """Returns an exponential moving average over about 1/40 of the values."""
    decay = 1 - 1 / max(1.0, len(values) / 40)
    average = weight = 0.0
    smooth = []
    for value in values:
        average = decay * average + (1 - decay) * value
        weight = decay * weight + (1 - decay)
        smooth.append(average / weight)  # The division corrects the start at 0.
    return np.array(smooth)
