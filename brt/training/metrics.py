"""Metrics of a run: metrics.jsonl, TensorBoard, and the tracking services W&B and MLflow.

The config section Logging chooses the services. These have runs, too: one run in the service has
the metrics of one training run. The id of the run in the service is stored in trackers.json in the
run directory, so that a resumed training run continues the same run in the service. The file also
identifies the run directory for which it was written. A moved directory therefore keeps its runs in
the services, and a copy of a directory begins new ones.
"""

import contextlib
import importlib
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
from types import ModuleType
from typing import Any

from jax.typing import ArrayLike
from tensorboardX import summary
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import RecordWriter

from brt import durable, untrusted
from brt.config import Config
from brt.config_io import saved_json
from brt.errors import CheckpointError, ConfigError
from brt.formatting import listed, one_line
from brt.training.workdir import Workdir, explain_lost_record, write_json

_TENSORBOARD_FLUSH_SECONDS = 10
_RECORD = {"step": int, str: untrusted.NUMBER | None}
_PLACE = {"host": str, "path": str, "inode": str}
_IDS = {"wandb?": str, "mlflow?": str, "directory?": _PLACE}
_SHOWN = 3  # A message names at most this number of damaged lines.


class MetricsWriter:
    """Writes metrics to metrics.jsonl, one line per step, and to TensorBoard and other trackers.

    Each step has one line, however often the run is restarted: a new writer removes the lines of
    steps after `resume_step` (0 for a new run), because the run trains these steps again. If lines
    are damaged, the writer removes them. It first copies the file to metrics.damaged_1.jsonl (or
    the next free number). Every line has the entry "perf/time", the time at which the first metric
    of the step was written, in seconds since 1970. `warn` is called with a message about damaged
    lines, or once if TensorBoard fails.
    """

    def __init__(
        self,
        workdir: Workdir,
        resume_step: int,
        warn: Callable[[str], None],
        trackers: Sequence["Tracker"] = (),
    ):
        self._path = workdir.metrics
        with explain_lost_record(self._path):
            if damaged := damaged_lines(self._path):
                warn(_set_aside(self._path, damaged))
        self._open(resume_step)
        self._tensorboard = TensorBoard(workdir.tensorboard, resume_step, warn)
        self._trackers: tuple[TensorBoard | Tracker, ...] = (self._tensorboard, *trackers)

    def _open(self, step: int) -> None:
        with explain_lost_record(self._path):
            self._line = _drop_after(self._path, step)
            self._file = durable.open_file(self._path, "r+b")
            self._offset = self._file.seek(0, os.SEEK_END)
        if self._line:
            # If the next call of `write` adds metrics to the last line, it writes this line again.
            # The offset is therefore the beginning of the line.
            self._offset -= len(_encode(self._line))

    def rewind(self, step: int) -> None:
        """Removes the metrics of steps after `step`; W&B and MLflow keep what they were sent."""
        with explain_lost_record(self._path):
            self._file.close()
        self._open(step)
        self._tensorboard.rewind(step)

    def write(self, step: int, values: Mapping[str, ArrayLike]) -> None:
        """Writes metrics; numbers that are not finite become null.

        `values` maps tags such as "train/loss" to numbers. The metrics are in the file when the
        call returns. `step` is later than in the previous call or, to add metrics to the line of
        the previous call, the same.
        """
        last = self._line.get("step", -1)
        if step < last:
            raise ValueError(f"step {step} is written after step {last}")
        numbers = {tag: _number(value) for tag, value in values.items()}
        with explain_lost_record(self._path):
            if step > last:
                self._offset = self._file.seek(0, os.SEEK_END)
                self._line = {"step": step, "perf/time": round(time.time(), 3)}
            self._line = {**self._line, **numbers}
            self._file.seek(self._offset)
            self._file.write(_encode(self._line))
            self._file.truncate()
            self._file.flush()
        for tracker in self._trackers:
            tracker.write(step, numbers)

    def has(self, step: int, tag: str) -> bool:
        """Returns True if the last line of the file is the line of `step` and contains `tag`."""
        return self._line.get("step") == step and tag in self._line

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()
        with explain_lost_record(self._path):
            self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns the records of a file metrics.jsonl, ordered by step.

    A record has the entry "step" and a number, or None, for each tag. Damaged lines are left out.
    """
    valid = filter(None, map(_record, _lines(path)))
    records = {record["step"]: record for record in valid}
    return [records[step] for step in sorted(records)]


def damaged_lines(path: Path) -> list[int]:
    """Returns the numbers, from 1, of the damaged lines of a file metrics.jsonl.

    An incomplete last line does not count, because a process that is killed may leave one.
    """
    *lines, last = _lines(path) or [b""]
    interrupted = re.fullmatch(rb"{[^}\0]*", last)
    lines += [] if interrupted else [last]
    return [i for i, line in enumerate(lines, 1) if line.strip() and not _record(line)]


def describe_damage(damaged: Sequence[int]) -> str:
    return f"damaged: cannot read line {listed(list(map(str, damaged)), _SHOWN)}"


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
            # The path is absolute, because the library would take the beginning of a relative path,
            # such as gs:, for a storage scheme.
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
    """Removes the lines of steps after `step`, and damaged lines, from a file metrics.jsonl.

    Returns the last record that remains; {} if there is none.
    """
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


class Tracker:
    """A tracking service, which gets the metrics in addition to metrics.jsonl.

    Failures of the service never stop a run, because metrics.jsonl has the complete record. At the
    first failure, `warn` is called with a message, and the service is not used any more.
    """

    name: str  # The Python module, and the extra of brt that installs the module, have this name.
    _begin: Callable[[Config, Workdir, str | None], str]
    _log: Callable[[int, Mapping[str, float | int]], None]
    _end: Callable[[], None]

    def __init__(self, module: ModuleType, warn: Callable[[str], object]):
        self._module, self._warn, self._on = module, warn, True

    def refuses(self) -> str:
        """Returns the reason why the service cannot record metrics here; "" if it can."""
        return ""

    def write(self, step: int, metrics: Mapping[str, float | int | None]) -> None:
        """Sends the metrics of a step to the service, except for metrics that are not finite."""
        finite = {tag: value for tag, value in metrics.items() if value is not None}
        self._tolerated(lambda: self._log(step, finite))

    def close(self) -> None:
        self._tolerated(self._end)

    def begin(self, config: Config, workdir: Workdir, run_id: str | None) -> str | None:
        """Starts or continues a run in the service; returns its id, or None after a failure."""
        return self._tolerated(lambda: self._begin(config, workdir, run_id))

    def _tolerated(self, call: Callable[[], Any]) -> Any:
        try:
            return call() if self._on else None
        # Problems of network, login and server raise errors of many classes, so all are caught.
        except Exception as error:
            self._on = False
            reason = " ".join(str(error).split())
            self._warn(f"{self.name} is off: {reason}; metrics.jsonl is still written")
            return None


class _Wandb(Tracker):
    name = "wandb"

    def _begin(self, config: Config, workdir: Workdir, run_id: str | None) -> str:
        self._run = self._module.init(
            project=config.logging.wandb_project, name=one_line(workdir.path.name), id=run_id,
            resume="allow", config=saved_json(config), dir=str(workdir.path),
        )  # fmt: skip
        return self._run.id

    def _log(self, step: int, metrics: Mapping[str, float | int]) -> None:
        self._run.log(dict(metrics), step=step)

    def _end(self) -> None:
        self._run.finish()


class _Mlflow(Tracker):
    name = "mlflow"

    def refuses(self) -> str:
        """Tries to open MLflow's database or directory; a server is not contacted."""
        where = self._module.get_tracking_uri()
        try:
            self._module.MlflowClient()
        # The classes of MLflow's errors depend on its version and on the kind of store, so errors
        # of all classes are caught.
        except Exception as error:
            return (
                f"MLflow cannot record at {where} ({' '.join(str(error).split())}); set "
                "MLFLOW_TRACKING_URI to a server, http://HOST:PORT, or to a database, "
                "sqlite:////PATH/mlflow.db, for which pip install 'brt[mlflow]'; or leave it out"
            )
        return ""

    def _begin(self, config: Config, workdir: Workdir, run_id: str | None) -> str:
        self._module.set_experiment(config.logging.mlflow_experiment)
        run = self._module.start_run(run_id=run_id, run_name=one_line(workdir.path.name))
        self._module.log_dict(saved_json(config), "config.json")
        return run.info.run_id

    def _log(self, step: int, metrics: Mapping[str, float | int]) -> None:
        self._module.log_metrics(dict(metrics), step=step)

    def _end(self) -> None:
        self._module.end_run()


def requested_trackers(config: Config, warn: Callable[[str], object]) -> list[Tracker]:
    """Returns the tracking services that the config asks for, without starting runs in them.

    ConfigError is raised if one is not installed, or cannot record anything on this machine.
    """
    settings = {
        "Logging.wandb_project": (config.logging.wandb_project, _Wandb),
        "Logging.mlflow_experiment": (config.logging.mlflow_experiment, _Mlflow),
    }
    services = []
    for setting, (value, service_class) in settings.items():
        if not value:
            continue
        try:
            module = importlib.import_module(service_class.name)
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"{setting} = {value!r} needs the extra {service_class.name}: "
                f"pip install 'brt[{service_class.name}]', or leave it out"
            ) from error
        service = service_class(module, warn)
        if reason := service.refuses():
            raise ConfigError(f"{setting} = {value!r}: {reason}")
        services.append(service)
    return services


def start_trackers(
    config: Config, workdir: Workdir, warn: Callable[[str], object]
) -> list[Tracker]:
    """Starts a run in each tracking service that the config asks for, and returns the services.

    Each service continues the run that this run directory began in it earlier, if there is one. A
    copy of a run directory begins new runs.
    """
    services, file = requested_trackers(config, warn), workdir.path / "trackers.json"
    if not services:
        return []
    earlier, place = read_trackers(file), _place(workdir)
    if _is_copy(earlier.get("directory"), place):
        names = " and ".join(service.name for service in services)
        where = earlier["directory"]["path"]
        warn(f"{workdir.path} is a copy of {where} and begins a new run in {names}")
        earlier = {}
    ids = {s.name: s.begin(config, workdir, earlier.get(s.name)) for s in services}
    known = {name: run_id for name, run_id in ids.items() if run_id}
    write_json(file, {**earlier, **known, "directory": place})
    return services


def _place(workdir: Workdir) -> dict[str, Any]:
    """Returns JSON that identifies a run directory; a copy of it has another path and inode."""
    path = os.fsencode(workdir.path.resolve()).decode(errors="backslashreplace")
    inode = str(workdir.path.stat().st_ino)
    return {"host": socket.gethostname(), "path": path, "inode": inode}


def _is_copy(saved: Mapping[str, Any] | None, now: Mapping[str, Any]) -> bool:
    """Returns True if a run directory (`now`) is a copy of the one that trackers.json names.

    A renamed directory keeps its inode, also on a disk that another machine mounts. On the same
    machine, a directory with another inode is a copy only if the original is still elsewhere.
    """
    if saved is None or saved["inode"] == now["inode"]:
        return False
    if saved["host"] != now["host"]:
        return True
    return saved["path"] != now["path"] and os.path.exists(Path(saved["path"], "trackers.json"))


def read_trackers(file: Path) -> dict[str, Any]:
    """Returns the content of trackers.json; {} if there is no file.

    It maps the name of each service to the id of a run there, and "directory" to a `_place`.
    """
    try:
        return untrusted.read_json(file, _IDS)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{file} is damaged ({error}); delete it to begin new runs there"
        ) from error
