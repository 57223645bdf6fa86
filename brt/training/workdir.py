"""The directory of a run: its layout, its lock, its provenance, and safe writes into it."""

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

_LONGEST_HOLDER = 500  # The largest number of bytes that are read of a lock file.
_LIBRARIES = ("brt", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


@dataclasses.dataclass(frozen=True)
class Workdir:
    """Paths of the files and directories in a run directory; the object creates none of them."""

    path: Path

    @property
    def config_gin(self) -> Path:
        return self.path / "config.gin"

    @property
    def config_json(self) -> Path:
        return self.path / "config.json"

    @property
    def provenance(self) -> Path:
        """Path of the description of versions, machine and command."""
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
        """Path of the record of bad steps; next to the checkpoints, as all processes read it."""
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
        """Path of the directory of files that say what each process is doing."""
        return self.path / "heartbeat"

    @property
    def log(self) -> Path:
        return self.path / "log.txt"


@dataclasses.dataclass(frozen=True)
class _Shadow(Workdir):
    """A temporary directory in place of a workdir, with its checkpoints and heartbeats."""

    shared: Workdir = Workdir(Path())

    @property
    def checkpoints(self) -> Path:
        return self.shared.checkpoints

    @property
    def heartbeat(self) -> Path:
        return self.shared.heartbeat


def create(path: Path) -> Workdir:
    """Creates the directories of a run, unless they exist.

    Raises:
      ConfigError: a directory cannot be created, or a path that a run writes to is a link.
      CheckpointError: the storage fails.
    """
    workdir = Workdir(path)
    with explained(path):
        path.mkdir(parents=True, exist_ok=True)
        workdir.checkpoints.mkdir(exist_ok=True)  # An existing link to another disk is accepted.
    for directory in _directories(workdir):
        check_writable(directory, below=path)
    refuse_links(workdir)
    return workdir


def check_writable(directory: Path, *, below: Path | None = None) -> None:
    """Creates a directory, tests that it can be written, and removes files of killed processes.

    Args:
      directory: the directory.
      below: the run directory, below which no part of the path may be a link; None for no limit.

    Raises:
      ConfigError: the directory cannot be created or written, or is reached by a link.
      CheckpointError: the storage fails.
    """
    with explained(directory):
        (below or directory).mkdir(parents=True, exist_ok=True)
        with durable.directory(directory, below=below, make=True):
            tempfile.TemporaryFile(dir=directory).close()
            durable.remove_abandoned(directory)


def refuse_links(workdir: Workdir) -> None:
    """Raises ConfigError if a path that a run writes to is a link, except for checkpoints.

    TensorBoard, the profiler and trackers write to the workdir too, and would follow links.
    """
    path = workdir.path
    with explained(path):
        top = [file for file in path.iterdir() if file.is_symlink() and _is_of_run(file.name)]
        inside = itertools.chain.from_iterable(
            map(durable.links, (*_directories(workdir), workdir.heartbeat))
        )
        for link in itertools.chain(top, inside):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(link))


def _directories(workdir: Workdir) -> tuple[Path, ...]:
    w = workdir
    return w.tokenizer, w.tensorboard, w.samples, w.evaluations, w.plots


def _is_of_run(name: str) -> bool:
    """Returns True if a run, or its trackers, write to a path of this name in the workdir."""
    files = ("*.json", "*.jsonl", "*.txt", "*.gin", "*.md", "*.csv", ".*lock")
    directories = ("evaluations", "heartbeat", "plots", "samples", "slurm", "tensorboard")
    others = ("tokenizer", "wandb", "mlruns", "mlruns.db")
    patterns = (*files, *directories, *others)
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


@contextlib.contextmanager
def shadow(workdir: Workdir) -> Iterator[Workdir]:
    """Context that yields a temporary workdir with the checkpoints and heartbeats of a real one.

    Everything else that is written to it vanishes after the block. All processes of a run use a
    shadow except for the first one, which writes the real workdir.
    """
    with tempfile.TemporaryDirectory(prefix="brt-") as directory:
        create(Path(directory))
        yield _Shadow(Path(directory), workdir)


def saved_config(path: Path | str) -> Config | None:
    """Returns the config of the run in a directory; None if there is no run.

    Raises:
      ConfigError: config.json cannot be read, or brt did not write it.
    """
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
    """Context that locks a run directory; the system releases the lock however the process ends.

    Args:
      workdir: the run directory.
      warn: called with a message if the previous trainer did not end in an orderly way, or if the
        file system has no locks.

    Raises:
      ConfigError: another trainer holds the lock, or the directory is not writable.
      CheckpointError: the storage fails.
    """
    path = workdir.path / ".lock"
    with contextlib.ExitStack() as stack:
        with explained(workdir.path):
            file = stack.enter_context(durable.open_file(path, "ab+", buffering=0))
            holder = _acquire(workdir, path, file, warn)
            if holder:
                warn(_takeover(holder))
            file.truncate(0)
            file.write(
                f"process {os.getpid()} on {socket.gethostname()}, started {_now()}".encode()
            )
            _remove_partial_files(workdir)

        def empty() -> None:
            with explained(path), permitted(path):
                file.truncate(0)

        stack.enter_context(closing(empty))
        yield


def _acquire(workdir: Workdir, path: Path, file: IO, warn: Callable[[str], None]) -> str:
    """Locks the file; returns its text, which a trainer leaves behind if it is killed."""
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
    """Removes partial files of a killed trainer.

    Other commands may be writing to `evaluations` now, so only abandoned files are removed there.
    """
    w = workdir
    directories = w.path, w.tokenizer, w.samples, w.plots, w.heartbeat
    for path in itertools.chain.from_iterable(map(durable.partial_files, directories)):
        path.unlink(missing_ok=True)
    for directory in (workdir.evaluations, *workdir.evaluations.glob("*")):
        durable.remove_abandoned(directory)


def provenance() -> dict[str, Any]:
    """Returns versions, machine, devices, command, commit and time of this process, as JSON."""
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
    """Writes a JSON file atomically; see `write_bytes`."""
    write_text(path, json.dumps(content, indent=1) + "\n", below=below)


def write_text(path: Path, text: str, *, below: Path | None = None) -> None:
    """Writes a text file atomically; see `write_bytes`."""
    write_bytes(path, text.encode(), below=below)


def write_bytes(path: Path, content: bytes, *, below: Path | None = None) -> None:
    """Writes a file atomically, so that no reader sees half of it.

    Args:
      path: the file.
      content: its bytes.
      below: the run directory, below which no part of the path may be a link; None for the
        directory of the file.

    Raises:
      ConfigError: the file cannot be written at this place.
      CheckpointError: the storage fails, or permission was withdrawn.
    """
    with explained(path), permitted(path):
        durable.write(path, content, below=below)


def _holder(file: IO) -> str:
    file.seek(0)
    return file.read(_LONGEST_HOLDER).decode(errors="replace").strip()


def _takeover(holder: str) -> str:
    message = f"taking over from a trainer that was killed ({holder})"
    if f" on {socket.gethostname()}, " not in holder:
        message += "; it ran on another host, so make sure that it has ended"
    return message


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Context that turns an OSError into a ConfigError or CheckpointError that names the path."""
    try:
        yield
    except OSError as error:
        raise _unwritable(path, error) from error


@contextlib.contextmanager
def permitted(path: Path) -> Iterator[None]:
    """Turns a PermissionError at a place that was writable when the run started into an error of
    storage, because the same command may succeed later.

    Raises:
      CheckpointError: the block raised PermissionError.
    """
    try:
        yield
    except PermissionError as error:
        raise CheckpointError(
            f"cannot write to {path}: {error.strerror}; permit it again, then run again"
        ) from error


def _unwritable(path: Path, error: OSError) -> BrtError:
    """Returns the error for a path that cannot be written.

    It is a CheckpointError if the storage fails, so that the same command may succeed later.
    """
    if error.errno == errno.ELOOP:
        return ConfigError(
            f"cannot write to {path}: {error.filename} is a symbolic link, which is not followed "
            "in a run's directory (checkpoints, and those in it, may be links); remove the "
            "link, or replace it with its target"
        )
    if durable.is_full(error):
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
    """Returns the commit of the checkout that brt runs from; None without a checkout or git."""
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
