"""Plots the measurements of `clustered.py`."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter


def draw(times: list[dict[str, Any]], sizes: list[dict[str, Any]], file: str) -> None:
    """Plots forward time against length, and error against forward time, into an image file."""
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for panel in (left, right):
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    against_length(left, times)
    against_time(right, sizes)
    figure.savefig(file, dpi=150)


def against_length(axes: Axes, rows: list[dict[str, Any]]) -> None:
    for kind in dict.fromkeys(row["kind"] for row in rows):
        points = [(row["tokens"], row["forward ms"]) for row in rows if row["kind"] == kind]
        axes.plot(*zip(*points, strict=True), "o-", label=kind, markersize=4)
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="milliseconds, forward")
    axes.set_xticks(sorted({row["tokens"] for row in rows}))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.legend(frameon=False, fontsize=8)


def against_time(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """Plots a line for each kind; points are labelled with their number of clusters or rounds."""
    for kind in dict.fromkeys(row["kind"].split(", ")[0] for row in rows):
        own = [row for row in rows if row["kind"].split(", ")[0] == kind]
        points = [(row["forward ms"], row["error"]) for row in own]
        axes.plot(*zip(*points, strict=True), "o-", label=kind, markersize=4)
        for row, point in zip(own, points, strict=True):
            size = row["kind"].split(", ")[1].split(" ")[0]
            axes.annotate(size, point, xytext=(4, 4), textcoords="offset points", fontsize=8)
    axes.set(xlabel="milliseconds, forward, 4,096 tokens", ylabel="||y - full|| / ||full||")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8, title="clusters, or rounds of hashing")
