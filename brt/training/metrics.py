"""Metrics of a run: metrics.jsonl, TensorBoard, the speed of training, and profiler traces."""

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

import jax
from jax.typing import ArrayLike
from tensorboardX import summary
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import RecordWriter

from brt import durable, untrusted
from brt.errors import CheckpointError
from brt.training.workdir import Workdir, refuse_links

_TENSORBOARD_FLUSH_SECONDS = 10
_RECORD = {"step": int, str: untrusted.NUMBER | None}
_SHOWN = 3  # A message names at most this number of damaged lines.


@runtime_checkable
class Tracker(Protocol):
    """A receiver of metrics in addition to metrics.jsonl, such as the client of a tracking service.

    A tracker raises no errors, because metrics.jsonl has the complete record.
    """

    def write(self, step: int, metrics: Mapping[str, float | int | None]) -> None:
        """Records metrics of a step, by tag; None stands for a number that is not finite."""

    def close(self) -> None:
        """Ends the tracker; `write` is not called afterwards."""


class MetricsWriter:
    """Writes metrics to metrics.jsonl, one line per step, and to TensorBoard and other trackers.

    Each step has one line, however often the run is restarted: a new writer removes the lines of
    steps after `resume_step` (0 for a new run), because the run trains these steps again. If lines
    are damaged, the writer copies the file to metrics.damaged_1.jsonl (or the next free number)
    before it removes the lines. Every line has the entry "perf/time", the time at which the first
    metric of the step was written, in seconds since 1970. `warn` is called with a message about
    damaged lines, or once if TensorBoard fails.
    """

    def __init__(
        self,
        workdir: Workdir,
        resume_step: int,
        warn: Callable[[str], None],
        trackers: Sequence[Tracker] = (),
    ):
        self._path = workdir.metrics
        with self._explain_errors():
            if damaged := damaged_lines(self._path):
                warn(_set_aside(self._path, damaged))
        self._open(resume_step)
        self._tensorboard = TensorBoard(workdir.tensorboard, resume_step, warn)
        self._trackers = trackers

    def _open(self, step: int) -> None:
        with self._explain_errors():
            self._line = _drop_after(self._path, step)
            self._file = durable.open_file(self._path, "r+b")
            self._offset = self._file.seek(0, os.SEEK_END)
        if self._line:
            # The next call of `write` may add metrics to the step of the last line, and then writes
            # this line again. The offset is therefore the beginning of the line.
            self._offset -= len(_encode(self._line))

    def rewind(self, step: int) -> None:
        """Removes the metrics of steps after `step`, except for those in other trackers."""
        with self._explain_errors():
            self._file.close()
        self._open(step)
        self._tensorboard.rewind(step)

    def write(self, step: int, values: Mapping[str, ArrayLike]) -> None:
        """Writes metrics by tag, such as "train/loss"; numbers that are not finite become null.

        The metrics are in the file when the call returns. `step` is the step of the previous call,
        whose line gets more metrics, or a later step.
        """
        last = self._line.get("step", -1)
        if step < last:
            raise ValueError(f"step {step} is written after step {last}")
        numbers = {tag: _number(value) for tag, value in values.items()}
        with self._explain_errors():
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
        """Returns True if the last line of metrics.jsonl is of `step` and has a value of `tag`."""
        return self._line.get("step") == step and tag in self._line

    def close(self) -> None:
        for tracker in (self._tensorboard, *self._trackers):
            tracker.close()
        with self._explain_errors():
            self._file.close()

    @contextlib.contextmanager
    def _explain_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"cannot write {self._path}: {error.strerror}; {durable.remedy(error)}, then run "
                "again to go on from the newest checkpoint"
            ) from error


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns the records of a file metrics.jsonl, ordered by step.

    A record has the entry "step" and a number, or None, for each tag. Damaged lines are left out.
    """
    valid = filter(None, map(_record, _lines(path)))
    records = {record["step"]: record for record in valid}
    return [records[step] for step in sorted(records)]


def damaged_lines(path: Path) -> list[int]:
    """Returns the numbers, from 1, of the damaged lines of a file metrics.jsonl.

    An incomplete last line does not count, because the end of a process may have interrupted it.
    """
    *lines, last = _lines(path) or [b""]
    interrupted = re.fullmatch(rb"{[^}\0]*", last)
    lines += [] if interrupted else [last]
    return [i for i, line in enumerate(lines, 1) if line.strip() and not _record(line)]


def describe_damage(damaged: Sequence[int]) -> str:
    """Returns a phrase that names the first three damaged lines."""
    more = f" and {len(damaged) - _SHOWN} more" if len(damaged) > _SHOWN else ""
    return f"damaged: cannot read line {', '.join(map(str, damaged[:_SHOWN]))}{more}"


class Rate(NamedTuple):
    """Speed of training over an interval, without pauses."""

    tokens_per_second: float
    step_seconds: float  # mean over the steps
    flops_per_second: float | None  # None if the FLOPs of a step are not known


class Throughput:
    """Measures the speed of training: tokens per second, without pauses.

    Steps run asynchronously, so `rate` has to be called after waiting for the last step's result.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._created = self._started = clock()
        self._paused = 0.0
        self._tokens = self._steps = self._all_steps = 0
        self._flops: int | None = 0

    def step(self, tokens: int, flops: int | None = None) -> None:
        """Counts a step; if its FLOPs are None, the FLOPs of the whole interval are unknown."""
        self._tokens += tokens
        self._flops = None if flops is None or self._flops is None else self._flops + flops
        self._steps += 1
        self._all_steps += 1

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Context whose time does not count as training, such as the time of an evaluation."""
        begin = self._clock()
        try:
            yield
        finally:
            now = self._clock()
            self._paused += now - begin
            # Before its first step, the run compiles. This pause occurs only once, so the clock
            # starts again after the pause, and `seconds_left` expects no further pauses of this
            # length.
            if not self._all_steps:
                self._created, self._started, self._paused = now, now, 0.0

    def rate(self) -> Rate:
        """Returns the speed since the last call; at least one step has to be counted in between."""
        now = self._clock()
        seconds = now - self._started - self._paused
        flops = None if self._flops is None else self._flops / seconds
        rate = Rate(self._tokens / seconds, seconds / self._steps, flops)
        self._started, self._paused = now, 0.0
        self._tokens = self._steps = self._flops = 0
        return rate

    def seconds_left(self, steps: int) -> float:
        """Returns the expected time of `steps` more steps, with pauses as so far."""
        return (self._clock() - self._created) / self._all_steps * steps


class TensorBoard:
    """Writes TensorBoard events from the calling thread, until writing fails for the first time.

    tensorboardX's own writer uses a thread, and would block the trainer if that thread died.
    """

    def __init__(self, directory: Path, resume_step: int, warn: Callable[[str], None]):
        self._warn = warn
        self._directory = directory
        self._flushed = -math.inf
        self._writer: RecordWriter | None = None
        with self._tolerate_errors():
            directory.mkdir(exist_ok=True)
            name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}"
            # For the library, the beginning of a relative name, such as gs:, is a kind of storage.
            self._writer = RecordWriter(os.path.abspath(directory / name))
            self._add(Event(file_version="brain.Event:2"))
        self.rewind(resume_step)

    def rewind(self, step: int) -> None:
        """Writes an event that makes TensorBoard hide the events of steps after `step`."""
        with self._tolerate_errors():
            purge = SessionLog(status=SessionLog.START)
            self._add(Event(step=step + 1, session_log=purge))

    def write(self, step: int, metrics: Mapping[str, float | int | None]) -> None:
        with self._tolerate_errors():
            for tag, value in metrics.items():
                value = math.nan if value is None else value
                self._add(Event(step=step, summary=summary.scalar(tag, value)))
            if self._writer and time.monotonic() - self._flushed > _TENSORBOARD_FLUSH_SECONDS:
                self._writer.flush()
                self._flushed = time.monotonic()

    def close(self) -> None:
        with self._tolerate_errors():
            if self._writer:
                self._writer.close()

    def _add(self, event: Event) -> None:
        if self._writer:
            event.wall_time = time.time()
            self._writer.write(event.SerializeToString())

    @contextlib.contextmanager
    def _tolerate_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            writer, self._writer = self._writer, None
            if writer:
                with contextlib.suppress(OSError):
                    writer.close()
            self._warn(
                f"TensorBoard is off, because {self._directory} cannot be written: "
                f"{error.strerror}; metrics.jsonl is still written"
            )


def _lines(path: Path) -> list[bytes]:
    """Returns the lines of a file, and the text after its last newline; [] if there is no file."""
    try:
        return untrusted.read_file(path).split(b"\n") if path.is_file() else []
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}; move it to another place"
        ) from error


def _record(line: bytes) -> dict[str, Any] | None:
    """Parses a line of metrics.jsonl; None if it is damaged."""
    try:
        record = untrusted.checked_json(
            line, _RECORD, partial(json.loads, parse_constant=lambda name: None)
        )
    except ValueError:
        return None
    return record if record["step"] >= 0 else None


def _set_aside(path: Path, damaged: Sequence[int]) -> str:
    """Copies a file before its damaged lines are removed; returns a message about the copy."""
    copies = (path.with_name(f"{path.stem}.damaged_{i}.jsonl") for i in itertools.count(1))
    copy = next(other for other in copies if not other.exists())
    durable.write(copy, untrusted.read_file(path))
    return (
        f"{path} is {describe_damage(damaged)}; the other lines are kept, and a copy is {copy.name}"
    )


def _drop_after(path: Path, step: int) -> dict[str, Any]:
    """Removes later steps and damaged lines from a metrics.jsonl; returns its last record."""
    text = untrusted.read_file(path) if path.exists() else b""
    records = [record for record in read_metrics(path) if record["step"] <= step]
    new_text = b"".join(map(_encode, records))
    if text != new_text or not path.exists():
        durable.write(path, new_text)
    return records[-1] if records else {}


def _encode(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, allow_nan=False).encode() + b"\n"


def _number(value: Any) -> float | int | None:
    number = value if isinstance(value, int) else float(value)
    return number if math.isfinite(number) else None


# The table gives the peak FLOP/s of dense bfloat16 matmuls, from the vendors' data sheets, by the
# name that jax gives to a kind of device.
_PEAKS = {
    # The data sheet of TPU v3 describes a chip, but a device of jax is one of the chip's two cores.
    "TPU v3": 123e12 / 2,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
}


def peak_flops(device: jax.Device) -> float | None:
    """Returns the peak FLOP/s of a device for bfloat16 matmuls; None if not known, as for CPUs."""
    kind = device.device_kind
    if kind in _PEAKS:
        return _PEAKS[kind]
    names = [name for name in _PEAKS if kind.startswith(f"{name} ") or kind.startswith(f"{name}-")]
    return _PEAKS[max(names, key=len)] if names and "TPU" not in kind else None


def utilization(flops_per_second: float | None, mesh: jax.sharding.Mesh) -> dict[str, float]:
    """Returns {"perf/mfu": FLOPs per second / peak of all devices}; {} if not known."""
    peak = peak_flops(mesh.devices.flat[0])
    if not (flops_per_second and peak):
        return {}
    return {"perf/mfu": flops_per_second / (peak * mesh.size)}


class Profile:
    """Records a profiler trace of steps: `steps` are the first and the last one; () for none."""

    def __init__(self, steps: tuple[int, ...], workdir: Workdir):
        self._steps, self._workdir, self._running = steps, workdir, False

    def before(self, step: int) -> None:
        """Starts the trace if `step`, which is about to run, is the first one to trace."""
        if self._steps and step == self._steps[0] and not self._running:
            # The profiler would follow symbolic links to places outside of the run directory.
            refuse_links(self._workdir)
            jax.profiler.start_trace(str(self._workdir.tensorboard))
            self._running = True

    def after(self, step: int, wait_for: object) -> bool:
        """If `step` is the last one to trace, ends the trace after `wait_for`; returns True."""
        if not (self._running and step >= self._steps[1]):
            return False
        jax.block_until_ready(wait_for)
        self.close()
        return True

    def close(self) -> None:
        """Ends a trace that is still running."""
        # If the run directory has been moved, the profiler would create it again.
        if self._running and self._workdir.tensorboard.is_dir():
            self._running = False
            # jax raises RuntimeError if another part of the program has already stopped the trace.
            with contextlib.suppress(RuntimeError):
                jax.profiler.stop_trace()
