"""Reads the results of the points of a sweep, and computes their means over seeds.

A point is one run of the sweep. A group consists of the points that differ only in their seed.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from brt import tasks, untrusted
from brt.checkpointing import reader
from brt.errors import CheckpointError
from brt.sweeping.directory import PointDirectory
from brt.sweeping.points import Point
from brt.tasks.interface import Task
from brt.tasks.report import EXACT_ANSWERS, Metric
from brt.training import evaluations, inspection
from brt.training.metrics import read_metrics

T = TypeVar("T")
_REPORT = {"answers?": [{"windows": int, EXACT_ANSWERS.name: untrusted.NUMBER}]}


class Row(NamedTuple):
    """The results of a point (one run of a sweep); None for results that do not exist yet."""

    point: Point
    status: str  # as in `PointProgress`
    reason: str  # why the point failed or was stopped; "" for other points
    metrics: dict[str, float]  # the metrics by which the task compares runs, by name
    # For documents with questions about facts (memory tasks), the percentage of exactly predicted
    # answers by the distance from fact to answer in windows; otherwise empty.
    answers: dict[int, float]
    # The next three fields are medians over the logging intervals of training.
    step_seconds: float | None
    tokens_per_second: float | None
    tokens_per_step: float | None
    parameters: int | None
    parameters_non_embedding: int | None
    steps: int  # the step of the newest checkpoint; 0 if there is none
    seconds: float  # the total run time of the point's commands
    threads: int  # the maximum number of threads of a command; 0 for no limit
    records: list[dict[str, Any]]  # of metrics.jsonl, the log of training, from tag to value


class Group(NamedTuple):
    """Points that differ only in their seed, with means over the points that are finished."""

    name: str  # the name of the points without the seed
    runs: int  # the number of finished points
    planned: int  # the number of points
    metrics: dict[str, float]  # means over the finished points that have the metric
    answers: dict[int, float]  # means over those that have answers at the distance; see `Row`
    spread: float | None  # largest minus smallest bits per byte; None for fewer than two points
    step_seconds: float | None
    # The step time divided by that of the baseline; None if the group and the baseline read
    # different numbers of tokens per step.
    relative_step_time: float | None
    tokens_per_second: float | None
    tokens_per_step: float | None
    parameters: int | None  # of the first finished point
    parameters_non_embedding: int | None
    rows: list[Row]  # the results of all points


def read(workdir: Path, points: Sequence[Point], split: str) -> list[Row]:
    """Returns the results of every point, including points that have not started."""
    return [_row(point, PointDirectory(workdir / point.directory), split) for point in points]


def group(rows: Sequence[Row], baseline: str) -> list[Group]:
    """Returns groups of rows that differ only in their seed, in the order of their first points."""
    members: dict[str, list[Row]] = {}
    for row in rows:
        members.setdefault(row.point.group, []).append(row)
    groups = [_group(name, group_rows) for name, group_rows in members.items()]
    base = reference(groups, baseline)
    return [
        g._replace(relative_step_time=g.step_seconds / base.step_seconds)
        if g.step_seconds and base.step_seconds and same_step([g, base])
        else g
        for g in groups
    ]


def same_step(groups: Sequence[Group]) -> bool:
    """Returns True if the steps of all groups read about the same number of tokens."""
    # Only then can the step times of the groups be compared. The largest number of tokens per step
    # may exceed the smallest by 2 %, because batches of padded rows differ from step to step.
    sizes = [g.tokens_per_step or 0.0 for g in groups]
    return not sizes or max(sizes) <= 1.02 * min(sizes)


def reference(groups: Sequence[Group], baseline: str) -> Group:
    """Returns the group with which the other groups are compared.

    `baseline` is the name of a group, the beginning of such a name up to a comma, or the name of a
    point. The result is the first group that has this name or point, or the first of all groups if
    none has it.
    """
    for g in groups:
        names = {g.name, *(row.point.name for row in g.rows)}
        if baseline in names or g.name.startswith(f"{baseline},"):
            return g
    return groups[0]


def _row(point: Point, directory: PointDirectory, split: str) -> Row:
    progress, run = directory.progress(), directory.run
    evaluation = directory.evaluation(split) if progress.status == "finished" else None
    content = report(evaluation, tasks.from_config(point.config)) if evaluation else {}
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
        metrics=_point_metrics(point, content),
        answers={row["windows"]: row[EXACT_ANSWERS.name] for row in content.get("answers", [])},
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


def _point_metrics(point: Point, report: dict[str, Any]) -> dict[str, float]:
    task = tasks.from_config(point.config)
    known = {**report, **task.select_metrics(report)} if report else {}
    values = {metric.name: known.get(metric.name) for metric in task.table_metrics}
    return {name: value for name, value in values.items() if value is not None}


def report(path: Path, task: Task) -> dict[str, Any]:
    """Returns brt.evaluate's report about a point; CheckpointError if the file is none."""
    try:
        content = evaluations.read(path)
        untrusted.check(content, _REPORT)
        untrusted.check(task.select_metrics(content), {str: untrusted.NUMBER})
        return content
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is no report that brt wrote ({error}); delete it, and run the command again"
        ) from error


def table_metrics(rows: Sequence[Row]) -> list[Metric]:
    """Returns the metrics by which tasks compare runs and of which some row has a value."""
    known = {
        metric.name: metric
        for row in rows
        for metric in tasks.from_config(row.point.config).table_metrics
    }
    return [metric for name, metric in known.items() if any(name in row.metrics for row in rows)]


def median(records: Sequence[dict[str, Any]], *tags: str) -> float | None:
    """Returns the median of a logged value, such as "perf/step_seconds", in records of training.

    With several tags, it is that of the product of their values. Records that lack a tag are left
    out; the result is None if no records are left.
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

    bits = [b for row in finished if (b := row.metrics.get("bits_per_byte")) is not None]
    first = finished[0] if finished else None
    return Group(
        name=name,
        runs=len(finished),
        planned=len(rows),
        metrics=means(lambda row: row.metrics),
        answers=means(lambda row: row.answers),
        spread=max(bits) - min(bits) if len(bits) > 1 else None,
        step_seconds=mean(lambda row: row.step_seconds),
        relative_step_time=None,
        tokens_per_second=mean(lambda row: row.tokens_per_second),
        tokens_per_step=mean(lambda row: row.tokens_per_step),
        parameters=first.parameters if first else None,
        parameters_non_embedding=first.parameters_non_embedding if first else None,
        rows=rows,
    )
