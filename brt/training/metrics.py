"""Numbers of a run: metrics.jsonl, TensorBoard, and how fast it goes."""

import contextlib
import itertools
import json
import math
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jax.typing import ArrayLike
from tensorboardX import summary
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import RecordWriter

from brt import durable, untrusted
from brt.errors import CheckpointError
from brt.training.workdir import Workdir

_TENSORBOARD_FLUSH_SECONDS = 10
_RECORD = {"step": int, str: untrusted.NUMBER | None}
_SHOWN = 3  # damaged lines that a sentence names


@runtime_checkable
class Tracker(Protocol):
    """Something else that is told the numbers. It never raises: metrics.jsonl is the truth."""

    def write(self, step: int, numbers: Mapping[str, float | int | None]) -> None:
        """Adds numbers to a step; None: not finite."""

    def close(self) -> None:
        """Nothing comes after."""


class MetricsWriter:
    """Appends to metrics.jsonl, one line a step whatever restarts, and to TensorBoard.

    Numbers beyond `resume_step` come from a run that was lost and are dropped. Where lines are
    damaged, a copy of the file stays as metrics.damaged_1.jsonl. TensorBoard is a convenience:
    where it fails, training goes on after one warning. `perf/time` says when a line was begun, in
    seconds since 1970.

    Args:
      workdir: the run's.
      resume_step: step of the checkpoint that the run resumes from; 0 for a new run.
      warn: told of damaged lines, and when TensorBoard fails.
      trackers: of others, which are told the same.

    Raises:
      CheckpointError: metrics.jsonl cannot be written.
    """

    def __init__(
        self,
        workdir: Workdir,
        resume_step: int,
        warn: Callable[[str], None],
        trackers: Sequence[Tracker] = (),
    ):
        self._path = workdir.metrics
        with self._explained():
            if damaged := damaged_lines(self._path):
                warn(_set_aside(self._path, damaged))
        self._open(resume_step)
        self._tensorboard = TensorBoard(workdir.tensorboard, resume_step, warn)
        self._trackers = trackers

    def _open(self, step: int) -> None:
        with self._explained():
            self._line = _drop_beyond(self._path, step)
            self._file = durable.open_file(self._path, "r+b")
            self._offset = self._file.seek(0, os.SEEK_END)
        if self._line:  # the last line may still grow
            self._offset -= len(_encode(self._line))

    def rewind(self, step: int) -> None:
        """Drops the numbers beyond a step; trackers of others keep them."""
        with self._explained():
            self._file.close()
        self._open(step)
        self._tensorboard.rewind(step)

    def write(self, step: int, values: Mapping[str, ArrayLike]) -> None:
        """Adds numbers to a step, the last one written or a later one; a kill loses none.

        What is not finite becomes null in metrics.jsonl.
        """
        last = self._line.get("step", -1)
        if step < last:
            raise ValueError(f"step {step} is written after step {last}")
        numbers = {tag: _number(value) for tag, value in values.items()}
        with self._explained():
            if step > last:
                self._offset = self._file.seek(0, os.SEEK_END)
                self._line = {"step": step, "perf/time": round(time.time(), 3)}
            self._line = {**self._line, **numbers}
            self._file.seek(self._offset)
            self._file.write(_encode(self._line))
            self._file.truncate()
            self._file.flush()
        for tracker in (self._tensorboard, *self._trackers):
            tracker.write(step, numbers)

    def has(self, step: int, tag: str) -> bool:
        """Whether `tag` is written for `step`, the last one written."""
        return self._line.get("step") == step and tag in self._line

    def close(self) -> None:
        """Closes all of them."""
        for tracker in (self._tensorboard, *self._trackers):
            tracker.close()
        with self._explained():
            self._file.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"cannot write {self._path}: {error.strerror}; {durable.remedy(error)}, then run "
                "again to go on from the newest checkpoint"
            ) from error


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl by step, of the lines that can be read."""
    found = filter(None, map(_record, _lines(path)))
    records = {record["step"]: record for record in found}
    return [records[step] for step in sorted(records)]


def damaged_lines(path: Path) -> list[int]:
    """Which lines of a metrics.jsonl cannot be read, from 1; not a last one that a crash tore."""
    *lines, last = _lines(path) or [b""]
    torn = re.fullmatch(rb"{[^}\0]*", last)  # a write that did not come to its end
    lines += [] if torn else [last]
    return [i for i, line in enumerate(lines, 1) if line.strip() and not _record(line)]


def unreadable(damaged: Sequence[int]) -> str:
    """What to say of a file with such lines."""
    more = f" and {len(damaged) - _SHOWN} more" if len(damaged) > _SHOWN else ""
    return f"damaged: cannot read line {', '.join(map(str, damaged[:_SHOWN]))}{more}"


class Rate(NamedTuple):
    """Speed over an interval, pauses excluded."""

    tokens_per_second: float
    step_seconds: float
    flops_per_second: float | None


class Throughput:
    """Tokens of an interval over its seconds, without the pauses in it.

    Steps run asynchronously, so read the rate after waiting for the last step's result.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._created = self._started = clock()
        self._paused = 0.0
        self._tokens = self._steps = self._all_steps = 0
        self._flops: int | None = 0

    def step(self, tokens: int, flops: int | None = None) -> None:
        """Counts a step; one whose FLOPs nobody counted spoils the interval's."""
        self._tokens += tokens
        self._flops = None if flops is None or self._flops is None else self._flops + flops
        self._steps += 1
        self._all_steps += 1

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """A time that is not training: compiling, evaluation, saving, sampling."""
        begin = self._clock()
        try:
            yield
        finally:
            now = self._clock()
            self._paused += now - begin
            if not self._all_steps:  # compiling happens once and says nothing about what is left
                self._created, self._started, self._paused = now, now, 0.0

    def rate(self) -> Rate:
        """The rate since the last call; starts the next interval. Needs a step in between."""
        now = self._clock()
        seconds = now - self._started - self._paused
        flops = None if self._flops is None else self._flops / seconds
        rate = Rate(self._tokens / seconds, seconds / self._steps, flops)
        self._started, self._paused = now, 0.0
        self._tokens = self._steps = self._flops = 0
        return rate

    def seconds_left(self, steps: int) -> float:
        """Expected time of so many more steps, with pauses as there were since the first step."""
        return (self._clock() - self._created) / self._all_steps * steps


class TensorBoard:
    """Writes events without tensorboardX's thread, whose death would block the trainer.

    Args:
      directory: of one writer; made if missing.
      resume_step: events of later steps, from an earlier writer, are hidden.
      warn: told once when writing fails, after which nothing more is written.
    """

    def __init__(self, directory: Path, resume_step: int, warn: Callable[[str], None]):
        self._warn = warn
        self._directory = directory
        self._flushed = -math.inf
        self._writer: RecordWriter | None = None
        with self._tolerated():
            directory.mkdir(parents=True, exist_ok=True)
            name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}"
            self._writer = RecordWriter(str(directory / name))
            self._add(Event(file_version="brain.Event:2"))
        self.rewind(resume_step)

    def rewind(self, step: int) -> None:
        """Hides what was written beyond a step."""
        with self._tolerated():
            purge = SessionLog(status=SessionLog.START)
            self._add(Event(step=step + 1, session_log=purge))

    def write(self, step: int, numbers: Mapping[str, float | int | None]) -> None:
        """Adds numbers to a step."""
        with self._tolerated():
            for tag, value in numbers.items():
                value = math.nan if value is None else value
                self._add(Event(step=step, summary=summary.scalar(tag, value)))
            if self._writer and time.monotonic() - self._flushed > _TENSORBOARD_FLUSH_SECONDS:
                self._writer.flush()
                self._flushed = time.monotonic()

    def close(self) -> None:
        """Closes the file."""
        with self._tolerated():
            if self._writer:
                self._writer.close()

    def _add(self, event: Event) -> None:
        if self._writer:
            event.wall_time = time.time()
            self._writer.write(event.SerializeToString())

    @contextlib.contextmanager
    def _tolerated(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            writer, self._writer = self._writer, None
            if writer:
                with contextlib.suppress(OSError):
                    writer.close()
            self._warn(
                f"TensorBoard is off, because {self._directory} cannot be written: "
                f"{error.strerror}; metrics.jsonl goes on"
            )


def _lines(path: Path) -> list[bytes]:
    """Of a file that may not be there; behind the last end of a line is one more."""
    return untrusted.read_file(path).split(b"\n") if path.is_file() else []


def _record(line: bytes) -> dict[str, Any] | None:
    """What a line says, if it is one of ours."""
    try:
        record = untrusted.checked_json(
            line, _RECORD, partial(json.loads, parse_constant=lambda name: None)
        )
    except ValueError:
        return None
    return record if record["step"] >= 0 else None


def _set_aside(path: Path, damaged: Sequence[int]) -> str:
    """Keeps a copy of a file before its damaged lines go; returns what to say of it."""
    copies = (path.with_name(f"{path.stem}.damaged_{i}.jsonl") for i in itertools.count(1))
    copy = next(other for other in copies if not other.exists())
    durable.write(copy, untrusted.read_file(path))
    return f"{path} is {unreadable(damaged)}; the others are kept, and it as {copy.name}"


def _drop_beyond(path: Path, step: int) -> dict[str, Any]:
    """Rewrites the file if it holds later steps or torn lines; returns its last record."""
    text = untrusted.read_file(path) if path.exists() else b""
    kept = [record for record in read_metrics(path) if record["step"] <= step]
    wanted = b"".join(map(_encode, kept))
    if text != wanted or not path.exists():
        durable.write(path, wanted)
    return kept[-1] if kept else {}


def _encode(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, allow_nan=False).encode() + b"\n"


def _number(value: Any) -> float | int | None:
    number = value if isinstance(value, int) else float(value)
    return number if math.isfinite(number) else None
