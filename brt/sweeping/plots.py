"""A sweep as pictures: the trade-off of bits against time, training curves, bars."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from brt.evaluation.drawing import curve, new_figure, smoothed
from brt.sweeping.results import Group

_TRADE_OFF, _BARS, _CURVES = "bits_against_step_time.png", "bits.png", "training_curves.png"
_BAR, _SEED = "#4c78a8", "#222222"
_LEGEND_LINES = 24


def draw(groups: Sequence[Group], directory: Path) -> list[str]:
    """Draws what there is something to draw of; returns the names of the files."""
    done = [g for g in groups if g.bits_per_byte is not None]
    figures = {}
    if any(g.step_seconds for g in done):
        figures[_TRADE_OFF] = trade_off([g for g in done if g.step_seconds])
    if done:
        figures[_BARS] = bars(done)
    begun = [g for g in groups if any(row.records for row in g.rows)]
    if begun:
        figures[_CURVES] = training_curves(begun)
    directory.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        temporary = directory / f".{name}.partial"
        figure.savefig(temporary, dpi=150, format="png")
        temporary.replace(directory / name)
    return list(figures)


def trade_off(groups: Sequence[Group]) -> Figure:
    """Bits per byte against the time of a step: below and to the left is better."""
    figure, (axes,) = new_figure(1, height=5.5)
    for color, g in zip(_colors(len(groups)), groups, strict=True):
        low, high = _range(g)
        milliseconds = 1000 * g.step_seconds
        axes.errorbar(
            milliseconds, g.bits_per_byte, fmt="o", color=color, capsize=3,
            yerr=[[g.bits_per_byte - low], [high - g.bits_per_byte]],
        )  # fmt: skip
        axes.annotate(
            g.name, (milliseconds, g.bits_per_byte), xytext=(6, 4), textcoords="offset points",
            fontsize=8, color=color,
        )  # fmt: skip
    axes.margins(0.15)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set(
        xlabel="milliseconds of a training step",
        ylabel="bits per byte, held-out",
        title="What the bits cost (bars: seeds)",
    )
    return figure


def bars(groups: Sequence[Group]) -> Figure:
    """Bits per byte of every group, with its seeds as dots."""
    figure, (axes,) = new_figure(1, height=1.6 + 0.35 * len(groups))
    places = range(len(groups))
    axes.barh(places, [g.bits_per_byte for g in groups], color=_BAR, alpha=0.6, height=0.65)
    for place, g in zip(places, groups, strict=True):
        bits = _bits(g)
        axes.plot(bits, [place] * len(bits), "o", color=_SEED, markersize=4)
    every = [bits for g in groups for bits in _bits(g)]
    low, high = min(every), max(every)
    margin = 0.15 * (high - low) or 0.1
    axes.set_yticks(places, [g.name for g in groups])
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(ScalarFormatter(useOffset=False))
    axes.set(
        xlabel="bits per byte, held-out (dots: seeds; the axis does not begin at 0)",
        xlim=(max(low - 3 * margin, 0), high + margin),
    )
    return figure


def training_curves(groups: Sequence[Group]) -> Figure:
    """Bits per token of every point in training, smoothed; a colour for each group."""
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
            tails.append(smooth[len(smooth) // 10 :])  # the first steps would squash the rest
            label = None
    if tails:
        low, high = min(t.min() for t in tails), max(t.max() for t in tails)
        margin = 0.06 * (high - low) or 0.1
        axes.set_ylim(low - margin, high + margin)
        _legend(axes, len(groups))
    axes.set(xlabel="training tokens", ylabel="bits per token", title="Training (smoothed)")
    return figure


def _legend(axes: Axes, groups: int) -> None:
    if groups <= _LEGEND_LINES:
        axes.legend(frameon=False, fontsize=8, ncols=1 + groups // 9)


def _colors(count: int) -> list[tuple[float, ...]]:
    table = matplotlib.colormaps["tab10" if count <= 10 else "tab20" if count <= 20 else "turbo"]
    if count <= 20:
        return [table(i) for i in range(count)]
    return [table(i / (count - 1)) for i in range(count)]


def _bits(g: Group) -> list[float]:
    return [row.bits_per_byte for row in g.rows if row.bits_per_byte is not None]


def _range(g: Group) -> tuple[float, float]:
    bits = _bits(g)
    return min(bits), max(bits)
