"""report.md, report.csv and plots/ of a sweep, whole or under way."""

import csv
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from brt.sweeping import plots, results
from brt.sweeping.points import Point
from brt.sweeping.results import Group, Row
from brt.sweeping.settings import Sweep
from brt.tasks.report import BITS_PER_BYTE, EXACT_ANSWERS
from brt.training.workdir import write_text

_NONE = "-"


def write(workdir: Path, points: Sequence[Point], sweep: Sweep) -> str:
    """Writes the report into the sweep's workdir and returns the table of the groups."""
    rows = results.read(workdir, points, sweep.split)
    groups = results.group(rows, sweep.baseline)
    pictures = plots.draw(groups, workdir / "plots", sweep.baseline)
    write_text(workdir / "report.csv", table_csv(rows, groups))
    write_text(workdir / "report.md", text(workdir, rows, groups, pictures, sweep))
    return "\n".join(group_table(groups))


def text(
    workdir: Path, rows: Sequence[Row], groups: Sequence[Group], pictures: list[str], sweep: Sweep
) -> str:
    """The report, in Markdown."""
    counts = Counter(row.status for row in rows)
    states = ", ".join(f"{count} {status}" for status, count in counts.items())
    baseline = results.reference(groups, sweep.baseline).name
    lines = [
        f"# {workdir.name}",
        "",
        f"{len(rows)} points: {states}. Figures are those of all {sweep.split} data, from their "
        "first token to their last. Step times are medians of training, relative to "
        f"{_cell(baseline)} where a step reads as many tokens{_sharing(rows)}.",
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
        lines += ["", "## Not finished, because", ""]
        lines += [f"- {row.point.name}: {row.reason} ({_output(row)})" for row in reasons]
    return "\n".join(lines) + "\n"


def group_table(groups: Sequence[Group]) -> list[str]:
    """A line per group: the means over its finished points."""
    return _table(
        {
            "": [_cell(g.name) for g in groups],
            "runs": [f"{g.runs}" if g.runs == g.planned else f"{g.runs} of {g.planned}"
                     for g in groups],
            **_measures(groups, [row for g in groups for row in g.rows]),
            "step ms": [_milliseconds(g.step_seconds) for g in groups],
            "relative": [_number(g.relative_step_time, ".2f") for g in groups],
            "tokens/step": [_number(g.tokens_per_step, ",.0f") for g in groups],
            "tokens/s": [_number(g.tokens_per_second, ",.0f") for g in groups],
            "parameters": [_number(g.parameters, ",") for g in groups],
            "without embedding": [_number(g.parameters_non_embedding, ",") for g in groups],
        }
    )  # fmt: skip


def point_table(rows: Sequence[Row]) -> list[str]:
    """A line per point."""
    return _table(
        {
            "": [_cell(row.point.name) for row in rows],
            "status": [row.status for row in rows],
            **_measures(rows, rows),
            "step ms": [_milliseconds(row.step_seconds) for row in rows],
            "tokens/step": [_number(row.tokens_per_step, ",.0f") for row in rows],
            "tokens/s": [_number(row.tokens_per_second, ",.0f") for row in rows],
            "steps": [f"{row.steps:,}" for row in rows],
        }
    )


def _distances(groups: Sequence[Group]) -> list[str]:
    """Exact answers of memory tasks, a column for each distance; nothing of others."""
    windows = sorted({distance for g in groups for distance in g.answers})
    if not windows:
        return []
    cells = {
        f"{far}": [_number(g.answers.get(far), EXACT_ANSWERS.form) for g in groups]
        for far in windows
    }
    title = f"{EXACT_ANSWERS.title}, up to so many windows behind what they follow from:"
    return [title, "", *_table({"": [_cell(g.name) for g in groups], **cells}), ""]


def table_csv(rows: Sequence[Row], groups: Sequence[Group]) -> str:
    """Every point with all its figures and bindings; what it lacks is empty."""
    relative = {g.name: (g.step_seconds, g.relative_step_time) for g in groups}
    fields = list(dict.fromkeys(name for row in rows for name in row.point.bindings))
    metrics = [column.name for column in results.columns(rows)]
    figures = (
        "step_seconds", "tokens_per_second", "tokens_per_step", "parameters",
        "parameters_non_embedding", "steps", "seconds", "threads", "reason",
    )  # fmt: skip
    file = io.StringIO()
    out = csv.writer(file, lineterminator="\n")
    names = [*metrics, *figures]
    out.writerow(["point", "group", "status", *names, "relative_step_time", *fields])
    for row in rows:
        group_seconds, times = relative[row.point.group]
        own = None
        if row.step_seconds and times and group_seconds:
            own = row.step_seconds * times / group_seconds
        bindings = [row.point.bindings.get(name, "") for name in fields]
        values = [row.figures.get(name) for name in metrics]
        values += [getattr(row, name) for name in figures]
        out.writerow([row.point.name, row.point.group, row.status, *values, own, *bindings])
    return file.getvalue()


def _measures(found: Sequence[Row] | Sequence[Group], rows: Sequence[Row]) -> dict[str, list[str]]:
    """Columns of what the tasks of these rows compare runs by."""
    cells = {}
    for column in results.columns(rows):
        values = [one.figures.get(column.name) for one in found]
        cells[column.title] = [_number(value, column.form) for value in values]
        if column == BITS_PER_BYTE and any(getattr(one, "spread", None) for one in found):
            cells["max - min"] = [_number(getattr(one, "spread", None), ".4f") for one in found]
    return cells


def _table(columns: Mapping[str, Sequence[str]]) -> list[str]:
    """A Markdown table that is also readable as it is: first column left, the others right."""
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
    """What a reader must know where points had to share the machine."""
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


def _cell(name: str) -> str:
    return name.replace("|", "\\|")
