"""The directory of a run: its layout, its lock, and where the run came from."""

import contextlib
import dataclasses
import datetime
import errno
import fnmatch
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
from typing import IO, Any

import jax

import brt
from brt import durable, locks, untrusted
from brt.config import Config
from brt.config_io import config_from_json
from brt.errors import BrtError, CheckpointError, ConfigError, closing
from brt.redaction import redacted

_LONGEST_HOLDER = 500  # bytes that are read of a lock
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
      ConfigError: that cannot be, or something in a run's place is a link.
      CheckpointError: the storage fails.
    """
    workdir = Workdir(path)
    with explained(path):
        path.mkdir(parents=True, exist_ok=True)
        workdir.checkpoints.mkdir(exist_ok=True)  # which may be a link to another disk
    for directory in _own_directories(workdir):
        check_writable(directory, below=path)
    refuse_links(workdir)
    return workdir


def check_writable(directory: Path, *, below: Path | None = None) -> None:
    """Makes a directory, and removes what killed processes were writing there.

    Args:
      below: the workdir, in which no link is followed on the way.

    Raises:
      ConfigError: it cannot be made, takes no file, or a part of it under `below` is a link.
      CheckpointError: the storage fails.
    """
    with explained(directory):
        (below or directory).mkdir(parents=True, exist_ok=True)
        with durable.directory(directory, below=below, make=True):
            tempfile.TemporaryFile(dir=directory).close()
            durable.remove_abandoned(directory)


def refuse_links(workdir: Workdir) -> None:
    """Raises ConfigError for a link where a run writes; `checkpoints`, and those in it, may be.

    Others' code writes there too (TensorBoard, the profiler, trackers), and would follow it.
    """
    path = workdir.path
    with explained(path):
        top = [file for file in path.iterdir() if file.is_symlink() and _is_of_run(file.name)]
        inside = itertools.chain.from_iterable(
            map(durable.links, (*_own_directories(workdir), workdir.heartbeat))
        )
        for link in itertools.chain(top, inside):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(link))


def _own_directories(workdir: Workdir) -> tuple[Path, ...]:
    w = workdir
    return w.tokenizer, w.tensorboard, w.samples, w.evaluations, w.plots


def _is_of_run(name: str) -> bool:
    """Whether a run, or a tracker of it, writes to such a name in its workdir."""
    files = ("*.json", "*.jsonl", "*.txt", "*.gin", "*.md", "*.csv", ".*lock")
    directories = ("evaluations", "heartbeat", "plots", "samples", "slurm", "tensorboard")
    others = ("tokenizer", "wandb", "mlruns", "mlruns.db")
    patterns = (*files, *directories, *others)
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


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
        return config_from_json(untrusted.read_json(file, {str: dict}))
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
      CheckpointError: the storage fails.
    """
    path = workdir.path / ".lock"
    with contextlib.ExitStack() as stack:
        with explained(workdir.path):
            file = stack.enter_context(durable.open_file(path, "ab+", buffering=0))
            holder = _taken(workdir, path, file, warn)
            if holder:
                warn(_takeover(holder))
            file.truncate(0)
            file.write(
                f"process {os.getpid()} on {socket.gethostname()}, started {_now()}".encode()
            )
            _remove_partial_files(workdir)

        def empty() -> None:
            with explained(path):
                file.truncate(0)

        stack.enter_context(closing(empty))
        yield


def _taken(workdir: Workdir, path: Path, file: IO, warn: Callable[[str], None]) -> str:
    """Locks the file; returns what a trainer that did not empty it wrote there."""
    try:
        locked = locks.acquire(file)
    except BlockingIOError as error:
        raise ConfigError(
            f"{workdir.path} is in use by another trainer ({_holder(file) or 'starting'}); "
            f"wait for it, stop it, or choose another --workdir"
        ) from error
    if not locked:
        warn(f"{path} cannot be locked on this file system; do not start a second trainer here")
    return _holder(file)


def _remove_partial_files(workdir: Workdir) -> None:
    """Removes those of a trainer that was killed; others may be writing to `evaluations`."""
    own = workdir.path, workdir.tokenizer, workdir.samples, workdir.plots, workdir.heartbeat
    for path in itertools.chain.from_iterable(map(durable.partial_files, own)):
        path.unlink(missing_ok=True)
    for directory in (workdir.evaluations, *workdir.evaluations.glob("*")):
        durable.remove_abandoned(directory)


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
        "xla_flags": redacted(os.environ.get("XLA_FLAGS", "")),
    }


def write_json(path: Path, content: Any, *, below: Path | None = None) -> None:
    """Writes a JSON file that is never seen half written; see `write_bytes`."""
    write_text(path, json.dumps(content, indent=1) + "\n", below=below)


def write_text(path: Path, text: str, *, below: Path | None = None) -> None:
    """Writes a text file that is never seen half written; see `write_bytes`."""
    write_bytes(path, text.encode(), below=below)


def write_bytes(path: Path, content: bytes, *, below: Path | None = None) -> None:
    """Writes a file that is never seen half written.

    Args:
      below: the workdir, in which no link is followed on the way; None: the file's directory.

    Raises:
      ConfigError: it cannot be written there.
      CheckpointError: the storage fails, or does not permit it any more.
    """
    with explained(path):
        try:
            durable.write(path, content, below=below)
        except PermissionError as error:  # of a directory that was found writable before
            raise CheckpointError(
                f"cannot write to {path}: {error.strerror}; permit it again, then run again"
            ) from error


def _holder(file: IO) -> str:
    file.seek(0)
    return file.read(_LONGEST_HOLDER).decode(errors="replace").strip()


def _takeover(holder: str) -> str:
    message = f"taking over from a trainer that ended without goodbye ({holder})"
    if f" on {socket.gethostname()}, " not in holder:
        message += "; it ran on another host, so make sure that it is gone"
    return message


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Raises ConfigError or CheckpointError, as `write_bytes` does, for an OSError in the block."""
    try:
        yield
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> BrtError:
    """Says what cannot be written; where the storage fails the same command will do later."""
    if error.errno == errno.ELOOP:
        return ConfigError(
            f"cannot write to {path}: {error.filename} is a symbolic link, which is not followed "
            "in a run's directory (checkpoints, and those in it, may be links); remove it, or put "
            "there what it leads to"
        )
    if durable.no_room(error):
        why = f"{error.strerror} ({durable.shortage(path, error)})"
        return CheckpointError(f"cannot write to {path}: {why}; make room there")
    if durable.storage_fails(error):
        return CheckpointError(
            f"cannot write to {path}: {error.strerror}; see to the disk, then run again"
        )
    remedy = "choose another --workdir or make room there"
    return ConfigError(f"cannot write to {path}: {error.strerror}; {remedy}")


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
