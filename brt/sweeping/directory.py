"""Reads and writes the files that a sweep adds to the run directory of a point.

point.gin    the complete config, for brt.train
point.json   the config as JSON, with the name, the bindings and the progress of the point
output.txt   the output of all commands
"""

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Literal

from brt import durable, storage, untrusted
from brt.checkpointing import reader
from brt.config import Config
from brt.config_io import config_from_json, config_json, config_text, difference
from brt.errors import ConfigError
from brt.sweeping.points import Point
from brt.training.workdir import (
    Workdir,
    check_writable,
    explain_write_errors,
    write_json,
    write_text,
)

Status = Literal["waiting", "unfinished", "trained", "finished", "failed"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PointProgress:
    """The progress of a point (one run of a sweep)."""

    # A "trained" point has not been evaluated yet, and a "finished" point has.
    status: Status = "waiting"
    reason: str = ""  # why the point failed or was stopped; "" for other points
    seconds: float = 0.0  # the total run time of the point's commands
    threads: int = 0  # the maximum number of threads of a command; 0 for no limit


_POINT = {
    "progress": {
        "status?": Status, "reason?": str, "seconds?": untrusted.NUMBER, "threads?": int,
    },
    "config": {str: dict},
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class PointDirectory:
    """The files of a point (one run of a sweep). Creating the object creates no file."""

    path: Path

    @property
    def gin(self) -> Path:
        """The file with the config for brt.train."""
        return self.path / "point.gin"

    @property
    def json(self) -> Path:
        """The file with the config and the progress."""
        return self.path / "point.json"

    @property
    def output(self) -> Path:
        """The file with the output of all commands of the point."""
        return self.path / "output.txt"

    @property
    def run(self) -> Workdir:
        """The same directory as a `Workdir`, which has the paths of the files of brt.train."""
        return Workdir(self.path)

    def evaluation(self, split: str) -> Path | None:
        """Returns the path of brt.evaluate's report about the last checkpoint; None if missing."""
        # The step is taken from the checkpoints, because the config does not contain the last step
        # if the length of training is given in epochs.
        steps = reader.steps(self.run.checkpoints)
        file = self.run.evaluations / str(steps[-1]) / f"{split}.json" if steps else None
        return file if file and file.exists() else None

    def progress(self) -> PointProgress:
        """Returns the saved progress. A point that has never been started has status "waiting"."""
        saved = self._saved()
        known = {field.name for field in dataclasses.fields(PointProgress)}
        values = saved["progress"] if saved else {}
        return PointProgress(**{name: value for name, value in values.items() if name in known})

    def config(self) -> Config | None:
        """Returns the config for which the directory was created; None if the directory is new."""
        saved = self._saved()
        return config_from_json(saved["config"]) if saved else None

    def write(self, point: Point, progress: PointProgress) -> None:
        check_writable(self.path, below=self.path.parent)
        write_text(self.gin, config_text(point.config), below=self.path.parent)
        content = {
            "name": point.name,
            "bindings": {
                name: list(value) if isinstance(value, tuple) else value
                for name, value in point.bindings.items()
            },
            "progress": dataclasses.asdict(progress),
            "config": config_json(point.config),
        }
        write_json(self.json, content, below=self.path.parent)

    def lock(self) -> IO[bytes] | None:
        """Locks the point for this process and for subprocesses that inherit the file.

        The result is an open file that holds the lock until all processes have closed it; None if
        another process of this sweep holds the lock.
        """
        check_writable(self.path, below=self.path.parent)
        own = self.path / ".sweep.lock"
        path = storage.of(own).lock_file(own)
        below = self.path.parent if path == own else None
        with explain_write_errors(path), contextlib.ExitStack() as stack:
            file = stack.enter_context(durable.open_file(path, "ab", below=below))
            try:
                # `acquire_lock` returns False if the file system does not support locks. This
                # result is ignored, because brt.train warns about such file systems.
                durable.acquire_lock(file)
            except BlockingIOError:
                return None
            stack.pop_all()
        return file

    def _saved(self) -> dict[str, Any] | None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            try:
                return untrusted.read_json(self.json, _POINT)
            except (FileNotFoundError, NotADirectoryError):
                raise
            except (OSError, ValueError) as error:
                raise ConfigError(f"{self.json} is no point that brt wrote: {error}") from error
        return None


def check_unchanged(workdir: Path, points: Sequence[Point]) -> None:
    """Raises ConfigError if the directory of a point was created for another config."""
    for point in points:
        directory = PointDirectory(workdir / point.directory)
        saved = directory.config()
        if saved is None:
            continue
        changed = [
            f"{name} was {old!r} and is {new!r}"
            for name, old, new in difference(saved, point.config)
        ]
        if changed:
            raise ConfigError(
                f"{directory.path} was made for another sweep: {'; '.join(changed)}; set it back, "
                "or choose another --workdir"
            )
