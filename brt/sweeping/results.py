"""What the points of a sweep came to, read from their directories; groups over seeds."""

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from brt.sweeping.directory import Directory
from brt.sweeping.points import Point
from brt.training import checkpoint, inspection
from brt.training.metrics import read_metrics


class Row(NamedTuple):
    """A point. What it has not come to is None.

    Attributes:
      bits_per_token: of the masked ones alone, where those are predicted.
      step_seconds: median over the intervals of training.
      tokens_per_second: of training, the same.
      steps: in the newest checkpoint.
      token_error_rate: in percent, of models that write transcripts.
      score: in percent, accuracy of labels or F1 of answers.
      rouge_l: F1 of summaries, in percent; see the protocol in the point's evaluations.
      records: metrics.jsonl.
    """

    point: Point
    status: str
    reason: str
    bits_per_byte: float | None
    bits_per_token: float | None
    token_error_rate: float | None
    score: float | None
    rouge_l: float | None
    step_seconds: float | None
    tokens_per_second: float | None
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
      spread: of their bits per byte: highest less lowest; None for fewer than two.
      relative_step_time: to the baseline's.
    """

    name: str
    runs: int
    planned: int
    bits_per_byte: float | None
    spread: float | None
    bits_per_token: float | None
    token_error_rate: float | None
    score: float | None
    rouge_l: float | None
    step_seconds: float | None
    relative_step_time: float | None
    tokens_per_second: float | None
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
    seconds = reference(groups, baseline).step_seconds
    return [
        g._replace(relative_step_time=g.step_seconds / seconds) if g.step_seconds and seconds else g
        for g in groups
    ]


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
    figures = json.loads(evaluation.read_text(encoding="utf-8")) if evaluation else {}
    records = read_metrics(run.metrics)
    steps = checkpoint.steps(run.checkpoints)
    total = rest = None
    if steps:
        total, rest = inspection.parameter_counts(checkpoint.read_meta(run.checkpoints, steps[-1]))
    status = progress.status
    return Row(
        point=point,
        status="trained" if status == "finished" and not evaluation else status,
        reason=progress.reason,
        bits_per_byte=figures.get("bits_per_byte"),
        bits_per_token=figures.get("bits_per_token", figures.get("bits_per_masked_token")),
        token_error_rate=figures.get("token_error_rate"),
        score=figures.get("score"),
        rouge_l=figures["rouge"]["rougeL"]["f1"] if "rouge" in figures else None,
        step_seconds=_median(records, "perf/step_seconds"),
        tokens_per_second=_median(records, "perf/tokens_per_second"),
        parameters=total,
        parameters_non_embedding=rest,
        steps=steps[-1] if steps else 0,
        seconds=progress.seconds,
        threads=progress.threads,
        records=records,
    )


def _median(records: Sequence[dict[str, Any]], tag: str) -> float | None:
    values = [record[tag] for record in records if record.get(tag) is not None]
    return statistics.median(values) if values else None


def _group(name: str, rows: list[Row]) -> Group:
    finished = [row for row in rows if row.status == "finished"]

    def mean(value: Callable[[Row], float | None]) -> float | None:
        values = [v for v in map(value, finished) if v is not None]
        return statistics.fmean(values) if values else None

    bits = [row.bits_per_byte for row in finished if row.bits_per_byte is not None]
    first = finished[0] if finished else None
    return Group(
        name=name,
        runs=len(finished),
        planned=len(rows),
        bits_per_byte=mean(lambda row: row.bits_per_byte),
        spread=max(bits) - min(bits) if len(bits) > 1 else None,
        bits_per_token=mean(lambda row: row.bits_per_token),
        token_error_rate=mean(lambda row: row.token_error_rate),
        score=mean(lambda row: row.score),
        rouge_l=mean(lambda row: row.rouge_l),
        step_seconds=mean(lambda row: row.step_seconds),
        relative_step_time=None,
        tokens_per_second=mean(lambda row: row.tokens_per_second),
        parameters=first.parameters if first else None,
        parameters_non_embedding=first.parameters_non_embedding if first else None,
        rows=rows,
    )
