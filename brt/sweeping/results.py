"""What the points of a sweep came to, read from their directories; groups over seeds."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from brt import tasks, untrusted
from brt.checkpointing import reader
from brt.errors import CheckpointError
from brt.sweeping.directory import Directory
from brt.sweeping.points import Point
from brt.tasks.interface import Task
from brt.tasks.report import EXACT_ANSWERS, Metric
from brt.training import evaluations, inspection
from brt.training.metrics import read_metrics

T = TypeVar("T")
_REPORT = {"answers?": [{"windows": int, EXACT_ANSWERS.name: untrusted.NUMBER}]}


class Row(NamedTuple):
    """A point. What it has not come to is None.

    Attributes:
      figures: that its task compares runs by, by name.
      answers: of memory tasks, exact ones in per cent by windows of distance.
      step_seconds: median over the intervals of training.
      tokens_per_second: of training, the same.
      tokens_per_step: the same.
      steps: in the newest checkpoint.
      records: metrics.jsonl.
    """

    point: Point
    status: str
    reason: str
    figures: dict[str, float]
    answers: dict[int, float]
    step_seconds: float | None
    tokens_per_second: float | None
    tokens_per_step: float | None
    parameters: int | None
    parameters_non_embedding: int | None
    steps: int
    seconds: float
    threads: int
    records: list[dict[str, Any]]


class Group(NamedTuple):
    """Points that differ in their seed only: means over those that are finished.

    Attributes:
      runs: how many are finished.
      figures: that any of them has, by name; answers: those that any has, by distance.
      spread: of their bits per byte: highest less lowest; None for fewer than two.
      relative_step_time: to the baseline's; None where its steps are of other size.
    """

    name: str
    runs: int
    planned: int
    figures: dict[str, float]
    answers: dict[int, float]
    spread: float | None
    step_seconds: float | None
    relative_step_time: float | None
    tokens_per_second: float | None
    tokens_per_step: float | None
    parameters: int | None
    parameters_non_embedding: int | None
    rows: list[Row]


def read(workdir: Path, points: Sequence[Point], split: str) -> list[Row]:
    """A row for every point, also for those that have not begun."""
    return [_row(point, Directory(workdir / point.directory), split) for point in points]


def group(rows: Sequence[Row], baseline: str) -> list[Group]:
    """Groups in the order of their first points.

    Args:
      baseline: see `reference`.
    """
    members: dict[str, list[Row]] = {}
    for row in rows:
        members.setdefault(row.point.group, []).append(row)
    groups = [_group(name, own) for name, own in members.items()]
    base = reference(groups, baseline)
    return [
        g._replace(relative_step_time=g.step_seconds / base.step_seconds)
        if g.step_seconds and base.step_seconds and same_step([g, base])
        else g
        for g in groups
    ]


def same_step(groups: Sequence[Group]) -> bool:
    """Whether a step of each reads as many tokens, so that their times can be compared.

    Batches of padded rows differ a little from step to step.
    """
    sizes = [g.tokens_per_step or 0.0 for g in groups]
    return not sizes or max(sizes) <= 1.02 * min(sizes)


def reference(groups: Sequence[Group], baseline: str) -> Group:
    """The first group of that name, with a point of it, or of that named point; else the first."""
    for g in groups:
        names = {g.name, *(row.point.name for row in g.rows)}
        if baseline in names or g.name.startswith(f"{baseline},"):
            return g
    return groups[0]


def _row(point: Point, directory: Directory, split: str) -> Row:
    progress, run = directory.progress(), directory.run
    evaluation = directory.evaluation(split) if progress.status == "finished" else None
    found = report(evaluation, tasks.from_config(point.config)) if evaluation else {}
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
        figures=_compared(point, found),
        answers={row["windows"]: row[EXACT_ANSWERS.name] for row in found.get("answers", [])},
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


def _compared(point: Point, report: dict[str, Any]) -> dict[str, float]:
    task = tasks.from_config(point.config)
    found = {**report, **task.select_metrics(report)} if report else {}
    values = {column.name: found.get(column.name) for column in task.table_metrics}
    return {name: value for name, value in values.items() if value is not None}


def report(path: Path, task: Task) -> dict[str, Any]:
    """The report of a point as JSON; raises CheckpointError where it is none of its task."""
    try:
        found = evaluations.read(path)
        untrusted.check(found, _REPORT)
        untrusted.check(task.select_metrics(found), {str: untrusted.NUMBER})
        return found
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is no report that brt wrote ({error}); delete it, and run the same again"
        ) from error


def columns(rows: Sequence[Row]) -> list[Metric]:
    """What the tasks of these rows compare runs by, as far as any row has it."""
    known = {
        column.name: column
        for row in rows
        for column in tasks.from_config(row.point.config).table_metrics
    }
    return [column for name, column in known.items() if any(name in row.figures for row in rows)]


def median(records: Sequence[dict[str, Any]], *tags: str) -> float | None:
    """The median over the records of the product of what stands under the tags."""
    found = [[record.get(tag) for tag in tags] for record in records]
    values = [math.prod(factors) for factors in found if None not in factors]
    return statistics.median(values) if values else None


def _group(name: str, rows: list[Row]) -> Group:
    finished = [row for row in rows if row.status == "finished"]

    def mean(value: Callable[[Row], float | None]) -> float | None:
        values = [v for v in map(value, finished) if v is not None]
        return statistics.fmean(values) if values else None

    def means(of: Callable[[Row], Mapping[T, float]]) -> dict[T, float]:
        found: dict[T, list[float]] = {}
        for row in finished:
            for name, value in of(row).items():
                found.setdefault(name, []).append(value)
        return {name: statistics.fmean(values) for name, values in found.items()}

    bits = [b for row in finished if (b := row.figures.get("bits_per_byte")) is not None]
    first = finished[0] if finished else None
    return Group(
        name=name,
        runs=len(finished),
        planned=len(rows),
        figures=means(lambda row: row.figures),
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
