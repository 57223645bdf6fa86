"""Writes the report of a sweep (report.md, report.csv and plots/), even while the sweep runs.

A point is one run of the sweep. A group consists of the points that differ only in their seed, and
has the means of their results.
"""

import contextlib
import csv
import io
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import nan
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import matplotlib
import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, ScalarFormatter

from brt import tasks, untrusted
from brt.checkpointing import reader
from brt.drawing import curve, distance_plot, new_figure, png, smoothed
from brt.errors import CheckpointError
from brt.formatting import csv_value, markdown, plot_label
from brt.sweeping.directory import PointDirectory
from brt.sweeping.points import Point, Sweep
from brt.tasks.differences import Difference, difference_of_runs
from brt.tasks.interface import Task
from brt.tasks.report import BITS_PER_BYTE, EXACT_ANSWERS, Metric
from brt.training import evaluations, inspection
from brt.training.metrics import read_metrics
from brt.training.workdir import check_writable, write_bytes, write_text

T = TypeVar("T")
_REPORT = {"answers?": [{"windows": int, EXACT_ANSWERS.name: untrusted.NUMBER}]}
_DOCUMENT = {"bits": untrusted.NUMBER, "bytes": int}


class Row(NamedTuple):
    """The results of a point (one run of a sweep); None for results that do not exist yet."""

    point: Point
    status: str  # as in `PointProgress`
    reason: str  # why the point failed or was stopped; "" for other points
    metrics: dict[str, float]  # the metrics by which the task compares runs, by name
    # Maps the distance from a fact to the answer that repeats it, in windows, to the percentage of
    # exactly predicted answers. Empty if the documents are not from a memory task.
    answers: dict[int, float]
    # The bits and the bytes of each document; None if the evaluation has none.
    documents: Float[np.ndarray, "2 N"] | None
    # The next three fields are medians over the logging intervals of training.
    step_seconds: float | None
    tokens_per_second: float | None
    tokens_per_step: float | None
    parameters: int | None
    parameters_non_embedding: int | None
    steps: int  # the step of the newest checkpoint; 0 if there is none
    seconds: float  # the total run time of the point's commands
    threads: int  # the maximum number of threads of a command; 0 for no limit
    records: list[dict[str, Any]]  # the records (tag to value) of metrics.jsonl, the training log


class Group(NamedTuple):
    """Points that differ only in their seed, with means over the points that are finished."""

    name: str  # the name of the points without the seed
    runs: int  # the number of finished points
    planned: int  # the number of points
    metrics: dict[str, float]  # means over the finished points that have the metric
    answers: dict[int, float]  # means over the finished points that have the distance; see `Row`
    # Bits per byte minus those of the baseline. None for the baseline itself, and if the group and
    # the baseline did not read the same documents.
    difference: Difference | None
    step_seconds: float | None
    # The step time divided by that of the baseline; None if the group and the baseline read
    # different numbers of tokens per step.
    relative_step_time: float | None
    tokens_per_second: float | None
    tokens_per_step: float | None
    parameters: int | None  # of the first finished point
    parameters_non_embedding: int | None
    rows: list[Row]  # the results of all points


def group(rows: Sequence[Row], baseline: str) -> list[Group]:
    """Groups rows that differ only in their seed, and compares the groups with the baseline.

    Groups are in the order of their first points. `baseline` is as in `reference`.
    """
    members: dict[str, list[Row]] = {}
    for row in rows:
        members.setdefault(row.point.group, []).append(row)
    groups = [_group(name, group_rows) for name, group_rows in members.items()]
    base = reference(groups, baseline)
    return [
        g._replace(
            relative_step_time=g.step_seconds / base.step_seconds
            if g.step_seconds and base.step_seconds and same_step([g, base])
            else None,
            difference=None if g is base else _difference(g, base),
        )
        for g in groups
    ]


def _difference(group: Group, base: Group) -> Difference | None:
    runs, of_base = (
        [row.documents for row in g.rows if row.status == "finished" and row.documents is not None]
        for g in (group, base)
    )
    if not runs or not of_base:
        return None
    sizes = of_base[0][1]
    if not all(np.array_equal(one[1], sizes) for one in (*runs, *of_base)) or sizes.sum() <= 0:
        return None
    nats, other = (math.log(2) * np.stack([one[0] for one in own]) for own in (runs, of_base))
    return difference_of_runs(nats, other, sizes)


def same_step(groups: Sequence[Group]) -> bool:
    """Returns True if the steps of all groups read about the same number of tokens."""
    # Step times for different numbers of tokens cannot be compared. The largest number may exceed
    # the smallest by 2 %, because batches of padded rows differ from step to step.
    sizes = [g.tokens_per_step or 0.0 for g in groups]
    return not sizes or max(sizes) <= 1.02 * min(sizes)


def reference(groups: Sequence[Group], baseline: str) -> Group:
    """Returns the group with which the other groups are compared.

    `baseline` is the name of a group, the beginning of such a name up to a comma, or the name of a
    point. The result is the first group that has this name or point. If there is no such group, it
    is the first of all groups.
    """
    for g in groups:
        names = {g.name, *(row.point.name for row in g.rows)}
        if baseline in names or g.name.startswith(f"{baseline},"):
            return g
    return groups[0]


def read(workdir: Path, points: Sequence[Point], split: str) -> list[Row]:
    """Returns the results of every point, including points that have not started."""
    return [_row(point, PointDirectory(workdir / point.directory), split) for point in points]


def _row(point: Point, directory: PointDirectory, split: str) -> Row:
    progress, run = directory.progress(), directory.run
    evaluation = directory.evaluation(split) if progress.status == "finished" else None
    task = tasks.from_config(point.config)
    content = report(evaluation, task) if evaluation else {}
    known = {**content, **task.select_metrics(content)} if content else {}
    metrics = {metric.name: known.get(metric.name) for metric in task.table_metrics}
    records = read_metrics(run.metrics)
    steps = reader.steps(run.checkpoints)
    total = rest = None
    if steps:
        total, rest = inspection.parameter_counts(reader.read_meta(run.checkpoints, steps[-1]))
    status = progress.status
    return Row(
        point=point,
        status="trained" if status == "finished" and not evaluation else status,
        reason=progress.reason,
        metrics={name: value for name, value in metrics.items() if value is not None},
        answers={row["windows"]: row[EXACT_ANSWERS.name] for row in content.get("answers", [])},
        documents=documents(evaluation.with_name(f"{split}_documents.jsonl"))
        if evaluation
        else None,
        step_seconds=median(records, "perf/step_seconds"),
        tokens_per_second=median(records, "perf/tokens_per_second"),
        tokens_per_step=median(records, "perf/tokens_per_second", "perf/step_seconds"),
        parameters=total,
        parameters_non_embedding=rest,
        steps=steps[-1] if steps else 0,
        seconds=progress.seconds,
        threads=progress.threads,
        records=records,
    )


def report(path: Path, task: Task) -> dict[str, Any]:
    """Returns brt.evaluate's report about a point; raises CheckpointError for other files."""
    with _written_by_brt(path):
        content = evaluations.read(path)
        untrusted.check(content, _REPORT)
        untrusted.check(task.select_metrics(content), {str: untrusted.NUMBER})
        return content


def documents(path: Path) -> Float[np.ndarray, "2 N"] | None:
    """Returns the bits and bytes of each document of an evaluation; None if there is no file."""
    if not path.exists():
        return None
    with _written_by_brt(path):
        lines = untrusted.read_file(path).rstrip(b"\n").split(b"\n")
        rows = [untrusted.checked_json(line, _DOCUMENT) for line in lines]
        return np.array([[row["bits"], row["bytes"]] for row in rows]).T


@contextlib.contextmanager
def _written_by_brt(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is no report that brt wrote ({error}); delete it, and run the command again"
        ) from error


def table_metrics(rows: Sequence[Row]) -> list[Metric]:
    """Returns the metrics by which tasks compare runs, without metrics that no row has."""
    known = {
        metric.name: metric
        for row in rows
        for metric in tasks.from_config(row.point.config).table_metrics
    }
    return [metric for name, metric in known.items() if any(name in row.metrics for row in rows)]


def median(records: Sequence[dict[str, Any]], *tags: str) -> float | None:
    """Returns the median of a logged value, such as "perf/step_seconds", in records of training.

    With several tags, it is the median of the product of their values. Records that lack a tag are
    left out; the result is None if no records are left.
    """
    factors = [[record.get(tag) for tag in tags] for record in records]
    values = [math.prod(row) for row in factors if None not in row]
    return statistics.median(values) if values else None


def _group(name: str, rows: list[Row]) -> Group:
    finished = [row for row in rows if row.status == "finished"]

    def mean(value: Callable[[Row], float | None]) -> float | None:
        values = [v for v in map(value, finished) if v is not None]
        return statistics.fmean(values) if values else None

    def means(field: Callable[[Row], Mapping[T, float]]) -> dict[T, float]:
        collected: dict[T, list[float]] = {}
        for row in finished:
            for name, value in field(row).items():
                collected.setdefault(name, []).append(value)
        return {name: statistics.fmean(values) for name, values in collected.items()}

    first = finished[0] if finished else None
    return Group(
        name=name,
        runs=len(finished),
        planned=len(rows),
        metrics=means(lambda row: row.metrics),
        answers=means(lambda row: row.answers),
        difference=None,
        step_seconds=mean(lambda row: row.step_seconds),
        relative_step_time=None,
        tokens_per_second=mean(lambda row: row.tokens_per_second),
        tokens_per_step=mean(lambda row: row.tokens_per_step),
        parameters=first.parameters if first else None,
        parameters_non_embedding=first.parameters_non_embedding if first else None,
        rows=rows,
    )


_TRADE_OFF, _BARS, _CURVES = "bits_against_step_time.png", "bits.png", "training_curves.png"
_CONVERGENCE, _DISTANCES = "convergence.png", "answers_against_distance.png"
_LEARNED = "answers_learned.png"
_BAR, _SEED = "#4c78a8", "#222222"
_LEGEND_LINES = 24
_MOST_PANELS = 4  # A plot with several panels has at most this many side by side.
_NONE = "-"


def primary_metric(groups: Sequence[Group]) -> Metric:
    """Returns the metric to plot: the first in the report's table, or else bits per byte."""
    metrics = table_metrics([row for g in groups for row in g.rows])
    return metrics[0] if metrics else BITS_PER_BYTE


def _values_of_runs(metric: Metric, group: Group) -> list[float]:
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
        values, mean, milliseconds = (
            _values_of_runs(metric, g),
            g.metrics[metric.name],
            1000 * (g.step_seconds or nan) * (1 if steps else 1000 / (g.tokens_per_step or nan)),
        )
        axes.errorbar(
            milliseconds, mean, fmt="o", color=color, capsize=3,
            yerr=[[mean - min(values)], [max(values) - mean]],
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
    """Returns a plot of a metric, with a bar for the mean of each group and a dot for each run."""
    figure, (axes,) = new_figure(1, height=1.6 + 0.35 * len(groups))
    places = range(len(groups))
    axes.barh(places, [g.metrics[metric.name] for g in groups], color=_BAR, alpha=0.6, height=0.65)
    for place, g in zip(places, groups, strict=True):
        values = _values_of_runs(metric, g)
        axes.plot(values, [place] * len(values), "o", color=_SEED, markersize=4)
    every = [value for g in groups for value in _values_of_runs(metric, g)]
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
    figure, (axes,) = new_figure(1, height=5.5)

    def smooth_bits(row: Row) -> tuple[np.ndarray, np.ndarray]:
        tokens, bits = curve(row.records, "train/bits_per_token")
        return tokens, smoothed(bits)

    # The first tenth of a curve does not determine the limits of the axis, because its large values
    # would hide the differences between the curves in the rest.
    tails = [bits[len(bits) // 10 :] for bits in _plot_runs(axes, groups, smooth_bits)]
    if tails:
        low, high = min(t.min() for t in tails), max(t.max() for t in tails)
        margin = 0.06 * (high - low) or 0.1
        axes.set_ylim(low - margin, high + margin)
    axes.set(xlabel="training tokens", ylabel="bits per token", title="Training (smoothed)")
    return figure


def convergence(groups: Sequence[Group], metric: Metric) -> Figure:
    """Returns a plot of a validation metric against the minutes of training without compilation."""
    figure, (axes,) = new_figure(1, height=5.5)

    def validated(row: Row) -> tuple[np.ndarray, np.ndarray]:
        values = _validated(row, metric)
        minutes = np.array([*values]) * (row.step_seconds or 0) / 60
        return minutes, np.array([*values.values()])

    _plot_runs(axes, groups, validated)
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
        for shown, color in ((baseline, "#aaaaaa"), (g, _BAR)):
            for row in shown.rows:
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


def _plot_runs(
    axes: Axes, groups: Sequence[Group], values: Callable[[Row], tuple[np.ndarray, np.ndarray]]
) -> list[np.ndarray]:
    """Plots the line of every run that has values, and returns the values on the y axis.

    `values` returns the x and y of a run. All lines of a group have the same color.
    """
    plotted = []
    for color, g in zip(_colors(len(groups)), groups, strict=True):
        label: str | None = g.name
        for x, y in map(values, g.rows):
            if y.size:
                axes.plot(x, y, color=color, linewidth=1.2, alpha=0.8, label=label)
                plotted.append(y)
                label = None
    if plotted and len(groups) <= _LEGEND_LINES:
        axes.legend(frameon=False, fontsize=8, ncols=1 + len(groups) // 9)
    return plotted


def _colors(count: int) -> list[tuple[float, ...]]:
    table = matplotlib.colormaps["tab10" if count <= 10 else "tab20" if count <= 20 else "turbo"]
    if count <= 20:
        return [table(i) for i in range(count)]
    return [table(i / (count - 1)) for i in range(count)]


def write(workdir: Path, points: Sequence[Point], sweep: Sweep) -> str:
    """Writes the report to the directory of the sweep; returns the table of groups in Markdown."""
    rows = read(workdir, points, sweep.split)
    groups = group(rows, sweep.baseline)
    pictures = draw(groups, workdir / "plots", sweep.baseline)
    write_text(workdir / "report.csv", table_csv(rows, groups))
    write_text(workdir / "report.md", text(workdir, rows, groups, pictures, sweep))
    return "\n".join(group_table(groups))


def text(
    workdir: Path, rows: Sequence[Row], groups: Sequence[Group], pictures: list[str], sweep: Sweep
) -> str:
    """Returns the report in Markdown; `pictures` are the file names of the plots."""
    counts = Counter(row.status for row in rows)
    states = ", ".join(f"{count} {status}" for status, count in counts.items())
    baseline = reference(groups, sweep.baseline).name
    lines = [
        f"# {markdown(workdir.name)}",
        "",
        f"{len(rows)} points: {states}. Metrics are those of all {sweep.split} data, from their "
        "first token to their last. Intervals are over documents and, with several runs, seeds. "
        "Step times are medians of training, relative to "
        f"{markdown(baseline)} where a step reads as many tokens{_sharing(rows)}.",
        "",
        *group_table(groups),
        "",
        *_distances(groups),
        *(f"![{name}](plots/{name})" for name in pictures),
        "",
        "## Every point",
        "",
        *point_table(rows),
    ]
    reasons = [row for row in rows if row.reason]
    if reasons:
        lines += ["", "## Unfinished points", ""]
        lines += [
            f"- {markdown(f'{r.point.name}: {r.reason} ({r.point.directory}/output.txt)')}"
            for r in reasons
        ]
    return "\n".join(lines) + "\n"


def group_table(groups: Sequence[Group]) -> list[str]:
    """Returns the lines of a Markdown table of groups, with means over their finished points."""
    return _table(
        {
            "": [markdown(g.name) for g in groups],
            "runs": [f"{g.runs}" if g.runs == g.planned else f"{g.runs} of {g.planned}"
                     for g in groups],
            **_metric_columns(groups, [row for g in groups for row in g.rows]),
            "step ms": [_milliseconds(g.step_seconds) for g in groups],
            "relative": [_number(g.relative_step_time, ".2f") for g in groups],
            "tokens/step": [_number(g.tokens_per_step, ",.0f") for g in groups],
            "tokens/s": [_number(g.tokens_per_second, ",.0f") for g in groups],
            "parameters": [_number(g.parameters, ",") for g in groups],
            "without embedding": [_number(g.parameters_non_embedding, ",") for g in groups],
        }
    )  # fmt: skip


def point_table(rows: Sequence[Row]) -> list[str]:
    """Returns the lines of a Markdown table with the results of each point."""
    return _table(
        {
            "": [markdown(row.point.name) for row in rows],
            "status": [row.status for row in rows],
            **_metric_columns(rows, rows),
            "step ms": [_milliseconds(row.step_seconds) for row in rows],
            "tokens/step": [_number(row.tokens_per_step, ",.0f") for row in rows],
            "tokens/s": [_number(row.tokens_per_second, ",.0f") for row in rows],
            "steps": [f"{row.steps:,}" for row in rows],
        }
    )


def _distances(groups: Sequence[Group]) -> list[str]:
    """Returns the lines of the table of exact answers by distance; [] if no group has answers."""
    windows = sorted({distance for g in groups for distance in g.answers})
    if not windows:
        return []
    cells = {
        f"{far}": [_number(g.answers.get(far), EXACT_ANSWERS.form) for g in groups]
        for far in windows
    }
    title = f"{EXACT_ANSWERS.title}, by the distance in windows to the fact that they repeat:"
    return [title, "", *_table({"": [markdown(g.name) for g in groups], **cells}), ""]


def table_csv(rows: Sequence[Row], groups: Sequence[Group]) -> str:
    """Returns CSV with a line for each point: its results, and the settings that vary."""
    relative = {g.name: (g.step_seconds, g.relative_step_time) for g in groups}
    fields = list(dict.fromkeys(name for row in rows for name in row.point.bindings))
    metrics = [metric.name for metric in table_metrics(rows)]
    fields_of_rows = (
        "step_seconds", "tokens_per_second", "tokens_per_step", "parameters",
        "parameters_non_embedding", "steps", "seconds", "threads", "reason",
    )  # fmt: skip
    file = io.StringIO()
    names = [*metrics, *fields_of_rows]
    lines: list[list[Any]] = [["point", "group", "status", *names, "relative_step_time", *fields]]
    for row in rows:
        group_seconds, times = relative[row.point.group]
        relative_time = None
        if row.step_seconds and times and group_seconds:
            relative_time = row.step_seconds * times / group_seconds
        bindings = [row.point.bindings.get(name, "") for name in fields]
        values = [row.metrics.get(name) for name in metrics]
        values += [getattr(row, name) for name in fields_of_rows]
        lines.append(
            [row.point.name, row.point.group, row.status, *values, relative_time, *bindings]
        )
    csv.writer(file, lineterminator="\n").writerows([map(csv_value, line) for line in lines])
    return file.getvalue()


def _metric_columns(
    entries: Sequence[Row] | Sequence[Group], rows: Sequence[Row]
) -> dict[str, list[str]]:
    """Returns a column of a table, by title, for each metric in `table_metrics(rows)`.

    A column has a cell for each of `entries`, which are the rows or their groups. If a group has a
    `difference`, the differences have a column, too.
    """
    cells = {}
    for metric in table_metrics(rows):
        values = [entry.metrics.get(metric.name) for entry in entries]
        cells[metric.title] = [_number(value, metric.form) for value in values]
        if metric == BITS_PER_BYTE and any(getattr(entry, "difference", None) for entry in entries):
            cells["more than the baseline (95 %)"] = [
                _interval(getattr(entry, "difference", None)) for entry in entries
            ]
    return cells


def _table(columns: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns the lines of a Markdown table; the first column is aligned left, the others right."""
    widths = [max(3, len(title), *map(len, cells)) for title, cells in columns.items()]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = [list(columns), rule, *zip(*columns.values(), strict=True)]
    return [
        "| "
        + " | ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        + " |"
        for line in lines
    ]


def _sharing(rows: Sequence[Row]) -> str:
    """Returns a note if points ran in parallel, which affects their step times; "" otherwise."""
    threads = {row.threads for row in rows if row.status != "waiting"}
    if threads <= {0}:
        return ""
    if len(threads) == 1:
        return f", measured side by side with {threads.pop()} threads each"
    return ", measured with different --jobs, so compare them with care"


def _interval(difference: Difference | None) -> str:
    if difference is None:
        return _NONE
    value, half = difference
    text = f"{value:+.4f}"
    return text if half is None else f"{text} ({value - half:+.4f} to {value + half:+.4f})"


def _number(value: float | int | None, form: str) -> str:
    return _NONE if value is None else format(value, form)


def _milliseconds(seconds: float | None) -> str:
    return _NONE if seconds is None else f"{1000 * seconds:.1f}"
