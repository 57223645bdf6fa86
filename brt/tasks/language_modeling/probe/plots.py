"""Draws the results of the probes: WORKDIR/plots/probe_*.png."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from brt.drawing import logarithmic, new_figure, png
from brt.tasks.language_modeling.probe.text import span

_COLORS = {"normal": "#4c78a8", "state": "#e4572e", "cache": "#2a9d62", "memory": "#a05195"}


def draw(report: dict[str, Any]) -> dict[str, bytes]:
    """Returns plots of the result of `job.probe_report`, as PNG files by name."""
    figures = {"probe_positions.png": _positions(report["positions"])}
    if report["memory"]:
        figures["probe_memory.png"] = _memory(report["memory"])
    if report["layers"]:
        figures["probe_horizon.png"] = _horizon(report)
        figures["probe_gradients.png"] = _gradients(report["gradients"]["states"])
    return {name: png(figure) for name, figure in figures.items()}


def _axes(title: str, xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    figure, (axes,) = new_figure(1)
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    return figure, axes


def _memory(rows: list[dict[str, Any]]) -> Figure:
    figure, axes = _axes(
        "What the memory is worth", "replaced before every segment", "bits per byte more"
    )
    for place, row in enumerate(rows):
        error = row["standard_error"] or 0.0
        axes.bar(place, row["difference"], yerr=error, color=_COLORS[row["part"]], capsize=4)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(rows)), [f"{row['part']}\n{row['how']}" for row in rows])
    return figure


def _positions(rows: list[dict[str, Any]]) -> Figure:
    figure, axes = _axes(
        "Bits by position in the document", "tokens before the block", "bits per byte"
    )
    places = range(len(rows))
    axes.errorbar(
        places, [r["bits_per_byte"] for r in rows], [r["standard_error"] or 0.0 for r in rows],
        fmt="o-", color=_COLORS["normal"], capsize=4, label="normal",
    )  # fmt: skip
    for part in rows[0]["without"]:
        values = [row["without"][part] for row in rows]
        axes.plot(places, values, "o--", color=_COLORS[part], label=f"without the {part}")
    axes.set_xticks(places, [span(row) for row in rows])
    axes.legend(frameon=False)
    return figure


def _horizon(report: dict[str, Any]) -> Figure:
    figure, axes = _axes(
        "How long recurrent layers remember", "blocks", "share left of a disturbance of the states"
    )
    for row in report["layers"]:
        left = [1.0, *row["retention"]]
        (line,) = axes.plot(range(len(left)), left, "o-", label=f"layer {row['layer']}")
        if row["gate"] and (openness := row["gate"]["openness"]):
            blocks = np.arange(len(left))
            low, high = (openness[name] ** blocks for name in ("lower_quartile", "upper_quartile"))
            label = f"layer {row['layer']}: middle half of its gates"
            axes.fill_between(blocks, low, high, alpha=0.15, color=line.get_color(), label=label)
    axes.axhline(0.5, color="black", linestyle=":", linewidth=0.8)
    axes.legend(frameon=False)
    return figure


def _gradients(rows: list[dict[str, Any]]) -> Figure:
    figure, axes = _axes(
        "How far back the loss reaches", "block of the segment",
        "gradient norm at the states before the segment",
    )  # fmt: skip
    for row in rows:
        axes.plot(
            range(1, len(row["blocks"]) + 1), row["blocks"], "o-", label=f"layer {row['layer']}"
        )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    logarithmic(axes, [value for row in rows for value in row["blocks"]])
    axes.legend(frameon=False)
    return figure
