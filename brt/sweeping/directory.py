"""What a sweep keeps in a point's run directory, beside what the run keeps there.

point.gin    the whole config, for brt.train
point.json   the same, with the point's name, bindings and how far it is
output.txt   what the commands printed, start after start
"""

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Literal

from brt import durable, locks, untrusted
from brt.checkpointing import reader
from brt.config import Config
from brt.config_io import config_from_json, config_json, config_text, difference
from brt.errors import ConfigError
from brt.sweeping.points import Point
from brt.training.workdir import Workdir, check_writable, explained, write_json, write_text

Status = Literal["waiting", "unfinished", "trained", "finished", "failed"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a point is.

    Attributes:
      reason: why it failed, or was stopped.
      seconds: that its commands took, over all starts.
      threads: that each of them had at most; 0: all of the machine's.
    """

    status: Status = "waiting"
    reason: str = ""
    seconds: float = 0.0
    threads: int = 0


_POINT = {
    "progress": {
        "status?": Status, "reason?": str, "seconds?": untrusted.NUMBER, "threads?": int,
    },
    "config": {str: dict},
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Directory:
    """Paths of a point; nothing is created here."""

    path: Path

    @property
    def gin(self) -> Path:
        return self.path / "point.gin"

    @property
    def json(self) -> Path:
        return self.path / "point.json"

    @property
    def output(self) -> Path:
        return self.path / "output.txt"

    @property
    def run(self) -> Workdir:
        return Workdir(self.path)

    def evaluation(self, split: str) -> Path | None:
        """What brt.evaluate wrote of the last checkpoint; None where it has not.

        Its step is not in the config of a run that is measured in epochs.
        """
        steps = reader.steps(self.run.checkpoints)
        file = self.run.evaluations / str(steps[-1]) / f"{split}.json" if steps else None
        return file if file and file.exists() else None

    def progress(self) -> Progress:
        """How far the point is; `waiting` where it was never started."""
        saved = self._saved()
        known = {field.name for field in dataclasses.fields(Progress)}
        found = saved["progress"] if saved else {}
        return Progress(**{name: value for name, value in found.items() if name in known})

    def config(self) -> Config | None:
        """The config that the directory was made for, None for a new one."""
        saved = self._saved()
        return config_from_json(saved["config"]) if saved else None

    def write(self, point: Point, progress: Progress) -> None:
        """Notes what the point is, and how far."""
        check_writable(self.path, below=self.path.parent)
        write_text(self.gin, config_text(point.config), below=self.path.parent)  # not a stranger's
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
        """Takes the point for this process and for those that inherit the file.

        Returns:
          An open file that holds the lock until every process has closed it; None while
          another start of the sweep, or a command that outlived one, has it.

        Raises:
          ConfigError, CheckpointError: it cannot be written.
        """
        check_writable(self.path, below=self.path.parent)
        path = self.path / ".sweep.lock"
        with explained(path), contextlib.ExitStack() as stack:
            file = stack.enter_context(durable.open_file(path, "ab", below=self.path.parent))
            try:
                locks.acquire(file)  # brt.train warns of a file system without locks
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
    """Refuses a workdir in which a point's directory was made for another config."""
    for point in points:
        directory = Directory(workdir / point.directory)
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
