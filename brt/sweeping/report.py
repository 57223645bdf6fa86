"""Writes the report of a sweep (report.md, report.csv and plots/), even while the sweep runs.

A point is one run of the sweep. A group consists of the points that differ only in their seed, and
has the means of their results.
"""

import csv
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from brt.formatting import csv_value, markdown
from brt.sweeping import plots, results
from brt.sweeping.points import Point
from brt.sweeping.results import Group, Row
from brt.sweeping.settings import Sweep
from brt.tasks.report import BITS_PER_BYTE, EXACT_ANSWERS
from brt.training.workdir import write_text

_NONE = "-"


def write(workdir: Path, points: Sequence[Point], sweep: Sweep) -> str:
    """Writes the report to the directory of the sweep; returns the table of groups in Markdown."""
    rows = results.read(workdir, points, sweep.split)
    groups = results.group(rows, sweep.baseline)
    pictures = plots.draw(groups, workdir / "plots", sweep.baseline)
    write_text(workdir / "report.csv", table_csv(rows, groups))
    write_text(workdir / "report.md", text(workdir, rows, groups, pictures, sweep))
    return "\n".join(group_table(groups))


def text(
    workdir: Path, rows: Sequence[Row], groups: Sequence[Group], pictures: list[str], sweep: Sweep
) -> str:
    """Returns the report in Markdown; `pictures` are the file names of the plots."""
    counts = Counter(row.status for row in rows)
    states = ", ".join(f"{count} {status}" for status, count in counts.items())
    baseline = results.reference(groups, sweep.baseline).name
    lines = [
        f"# {markdown(workdir.name)}",
        "",
        f"{len(rows)} points: {states}. Metrics are those of all {sweep.split} data, from their "
        "first token to their last. Step times are medians of training, relative to "
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
            f"- {markdown(f'{row.point.name}: {row.reason} ({_output(row)})')}" for row in reasons
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
    """Returns the lines of the table of exact answers by distance; none without such answers."""
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
    """Returns a line of CSV for each point: all metrics, and all settings that the sweep binds."""
    relative = {g.name: (g.step_seconds, g.relative_step_time) for g in groups}
    fields = list(dict.fromkeys(name for row in rows for name in row.point.bindings))
    metrics = [metric.name for metric in results.table_metrics(rows)]
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
    """Returns the columns of the metrics by which the tasks of `rows` compare runs."""
    cells = {}
    for metric in results.table_metrics(rows):
        values = [entry.metrics.get(metric.name) for entry in entries]
        cells[metric.title] = [_number(value, metric.form) for value in values]
        if metric == BITS_PER_BYTE and any(getattr(entry, "spread", None) for entry in entries):
            spreads = [getattr(entry, "spread", None) for entry in entries]
            cells["max - min"] = [_number(spread, ".4f") for spread in spreads]
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
    """Returns a note if points ran in parallel, because their step times then depend on it."""
    threads = {row.threads for row in rows if row.status != "waiting"}
    if threads <= {0}:
        return ""
    if len(threads) == 1:
        return f", measured side by side with {threads.pop()} threads each"
    return ", measured with different --jobs, so compare them with care"


def _output(row: Row) -> str:
    return f"{row.point.directory}/output.txt"


def _number(value: float | int | None, form: str) -> str:
    return _NONE if value is None else format(value, form)


def _milliseconds(seconds: float | None) -> str:
    return _NONE if seconds is None else f"{1000 * seconds:.1f}"
