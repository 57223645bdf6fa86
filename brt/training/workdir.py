"""The directory of a run: its layout, its lock, and where the run came from."""

import contextlib
import dataclasses
import datetime
import importlib.metadata
import itertools
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import jax

import brt
from brt import durable, locks, untrusted
from brt.config import Config
from brt.config_io import config_from_json
from brt.errors import BrtError, CheckpointError, ConfigError
from brt.redaction import redacted

_LIBRARIES = ("brt", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


@dataclasses.dataclass(frozen=True)
class Workdir:
    """Paths of a run; nothing is created here."""

    path: Path

    @property
    def config_gin(self) -> Path:
        return self.path / "config.gin"

    @property
    def config_json(self) -> Path:
        return self.path / "config.json"

    @property
    def provenance(self) -> Path:
        return self.path / "provenance.json"

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer"

    @property
    def data(self) -> Path:
        return self.path / "data.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def bad_batches(self) -> Path:
        """Beside the checkpoints: all processes of a run read it."""
        return self.checkpoints.parent / "bad_batches.jsonl"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    @property
    def evaluations(self) -> Path:
        return self.path / "evaluations"

    @property
    def plots(self) -> Path:
        return self.path / "plots"

    @property
    def heartbeat(self) -> Path:
        return self.path / "heartbeat"

    @property
    def log(self) -> Path:
        return self.path / "log.txt"


@dataclasses.dataclass(frozen=True)
class _Shadow(Workdir):
    """Another directory with the checkpoints of a run, and its signs of life."""

    shared: Workdir = Workdir(Path())

    @property
    def checkpoints(self) -> Path:
        return self.shared.checkpoints

    @property
    def heartbeat(self) -> Path:
        return self.shared.heartbeat


def create(path: Path) -> Workdir:
    """Makes the directories of a run, new or resumed.

    Raises:
      ConfigError: that cannot be.
      CheckpointError: there is no room.
    """
    workdir = Workdir(path)
    try:
        for directory in (
            workdir.tokenizer,
            workdir.checkpoints,
            workdir.tensorboard,
            workdir.samples,
            workdir.evaluations,
            workdir.plots,
        ):
            directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from error
    return workdir


def check_writable(directory: Path) -> None:
    """Makes a directory.

    Raises:
      ConfigError: it cannot be made, or takes no file.
      CheckpointError: there is no room.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        raise _unwritable(directory, error) from error


@contextlib.contextmanager
def shadow(workdir: Workdir) -> Iterator[Workdir]:
    """A workdir with the same checkpoints and heartbeats, where all else that is written vanishes.

    For all processes of a run but the one that writes.
    """
    with tempfile.TemporaryDirectory(prefix="brt-") as place:
        create(Path(place))
        yield _Shadow(Path(place), workdir)


def saved_config(path: Path | str) -> Config | None:
    """The config of the run in a workdir, None where there is none."""
    file = Workdir(Path(path)).config_json
    try:
        return config_from_json(untrusted.read_object(file))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{file} is no config that brt wrote: {error}") from error


@contextlib.contextmanager
def lock(workdir: Workdir, warn: Callable[[str], None]) -> Iterator[None]:
    """Holds the workdir for one trainer; the system lets go of it however the process ends.

    Raises:
      ConfigError: another trainer holds it, or the directory is not writable.
      CheckpointError: there is no room.
    """
    path = workdir.path / ".lock"
    try:
        file = path.open("a+")
    except OSError as error:
        raise _unwritable(workdir.path, error) from error
    with file:
        try:
            locked = locks.acquire(file)
        except BlockingIOError as error:
            raise ConfigError(
                f"{workdir.path} is in use by another trainer ({_holder(file) or 'starting'}); "
                f"wait for it, stop it, or choose another --workdir"
            ) from error
        if not locked:
            warn(f"{path} cannot be locked on this file system; do not start a second trainer here")
        if holder := _holder(file):
            warn(_takeover(holder))
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}, started {_now()}")
        file.flush()
        _remove_partial_files(workdir)
        try:
            yield
        finally:
            file.truncate(0)


def _remove_partial_files(workdir: Workdir) -> None:
    """Those of a trainer that was killed while it wrote; others write to `evaluations` too."""
    own = workdir.path, workdir.tokenizer, workdir.samples, workdir.plots, workdir.heartbeat
    for path in itertools.chain.from_iterable(map(durable.partial_files, own)):
        path.unlink(missing_ok=True)


def provenance() -> dict[str, Any]:
    """What runs where, as JSON: versions, machine, devices, command, commit, time."""
    return {
        "command": redacted(sys.argv),
        "started": _now(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _LIBRARIES},
        "git": _git(Path(brt.__file__).parent.parent),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpus": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "devices": [
            f"{device.platform}:{device.id} {device.device_kind}" for device in jax.devices()
        ],
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file that is never seen half written."""
    write_text(path, json.dumps(content, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a text file that is never seen half written.

    Raises:
      ConfigError: it cannot be written there.
      CheckpointError: there is no room.
    """
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """The same, of bytes."""
    try:
        durable.write(path, content)
    except OSError as error:
        raise _unwritable(path, error) from error


def _holder(file: TextIO) -> str:
    file.seek(0)
    return file.read().strip()


def _takeover(holder: str) -> str:
    message = f"taking over from a trainer that ended without goodbye ({holder})"
    if f" on {socket.gethostname()}, " not in holder:
        message += "; it ran on another host, so make sure that it is gone"
    return message


def _unwritable(path: Path, error: OSError) -> BrtError:
    """Where there is no room the same command will do when there is some."""
    full = durable.no_room(error)
    remedy = "make room there" if full else "choose another --workdir or make room there"
    kind = CheckpointError if full else ConfigError
    return kind(f"cannot write to {path}: {error.strerror}; {remedy}")


def _now() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(checkout: Path) -> dict[str, Any] | None:
    """Commit of the checkout that brt runs from; None where it is installed or git is missing."""
    if not (checkout / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(checkout), *arguments],
            capture_output=True, text=True, check=True, timeout=10,
        ).stdout.strip()  # fmt: skip

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None
