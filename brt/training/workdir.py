"""The run directory (workdir): its layout, its lock, and functions that write files safely.

provenance.json records the versions, the machine and the command of a run.
"""

import contextlib
import dataclasses
import datetime
import errno
import importlib.metadata
import itertools
import json
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import jax

import brt
from brt import durable, storage, untrusted
from brt.config import Config
from brt.config_io import config_from_json
from brt.errors import BrtError, CheckpointError, ConfigError, closing
from brt.redaction import redacted


@contextlib.contextmanager
def explain_write_errors(
    path: Path, *, existed: bool = False, writable: bool = False
) -> Iterator[None]:
    """Context that turns an OSError into an error whose message names a path and a remedy.

    The error is a ConfigError, except in these cases, in which it is a CheckpointError:

    - The disk is full, or the storage fails.
    - Permission is denied, although the path was writable before (`writable` is True).
    - The path is gone, although the run directory existed when the command began (`existed` is
      True).
    """
    try:
        yield
    except FileNotFoundError as error:
        if not existed:
            raise _unwritable(path, error) from error
        raise CheckpointError(
            f"cannot write to {path}, because only {durable.nearest_existing(path)} is left of "
            "this path; if the run was moved, run again with its new --workdir"
        ) from error
    except OSError as error:
        if writable and isinstance(error, PermissionError):
            raise CheckpointError(
                f"cannot write to {path}: {error.strerror}; permit it again, then run again"
            ) from error
        raise _unwritable(path, error) from error


@contextlib.contextmanager
def explain_lost_record(path: Path) -> Iterator[None]:
    """Context that turns an OSError into a CheckpointError, for files that a run must write."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path}: {error.strerror}; {durable.remedy(error)}, then run again to go "
            "on from the newest checkpoint"
        ) from error


def _unwritable(path: Path, error: OSError) -> BrtError:
    if error.errno == errno.ELOOP:
        return ConfigError(
            f"cannot write to {path}: {error.filename} is a symbolic link, which is not followed "
            "in a run's directory (checkpoints, and those in it, may be links); remove the "
            "link, or replace it with its target"
        )
    if durable.is_full(error):
        why = f"{error.strerror} ({durable.describe_shortage(path, error)})"
        return CheckpointError(f"cannot write to {path}: {why}; make room there")
    if durable.storage_fails(error):
        return CheckpointError(
            f"cannot write to {path}: {error.strerror}; see to the disk, then run again"
        )
    remedy = "choose another --workdir"
    if isinstance(error, PermissionError):
        remedy += ", or permit it"
    return ConfigError(f"cannot write to {path}: {error.strerror}; {remedy}")


_LIBRARIES = ("brt", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def describe_process() -> dict[str, Any]:
    """Returns a description of this process as JSON: command, versions, machine and devices."""
    versions: dict[str, str | None] = dict.fromkeys(_LIBRARIES)
    for name in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "command": redacted(sys.argv),
        "started": current_time(),
        "python": platform.python_version(),
        "versions": versions,
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


def current_time() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


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


# Runs and tracking services write to paths with these names in a workdir.
_WRITTEN = re.compile(
    r".*\.(json|jsonl|txt|gin|md|csv)|\..*lock|evaluations|heartbeat|plots|samples|slurm|"
    r"tensorboard|tokenizer|wandb|mlruns(\.db)?",
    re.DOTALL,
).fullmatch
_LONGEST_HOLDER = 500  # At most this number of bytes are read from a lock file.


class _In:
    """A descriptor of `Workdir`: the attribute has the path of `name` in the run directory."""

    def __init__(self, name: str):
        self._name = name

    def __get__(self, workdir: "Workdir", owner: type) -> Path:
        return workdir.path / self._name


@dataclasses.dataclass(frozen=True)
class Workdir:
    """Paths of the files and directories in a run directory; the object creates none of them.

    If a run has several processes, the first one writes to the run directory, and the others to
    temporary directories. All processes use the checkpoints, bad_batches.jsonl and the heartbeat
    files in the directory `shared` (None: `path`).
    """

    path: Path
    shared: Path | None = None

    config_gin = _In("config.gin")
    config_json = _In("config.json")
    provenance = _In("provenance.json")  # versions, machine and command that train the run
    tokenizer = _In("tokenizer")
    data = _In("data.json")  # the description of the run's data, with checksums
    metrics = _In("metrics.jsonl")
    tensorboard = _In("tensorboard")
    samples = _In("samples")  # texts that the model generated during training
    evaluations = _In("evaluations")
    plots = _In("plots")
    log = _In("log.txt")

    @property
    def checkpoints(self) -> Path:
        """The directory of checkpoints; raises ConfigError if its path is not UTF-8."""
        return durable.utf8_path((self.shared or self.path) / "checkpoints")

    @property
    def bad_batches(self) -> Path:
        """The record of the batches of bad steps, which all processes read."""
        return self.checkpoints.parent / "bad_batches.jsonl"

    @property
    def heartbeat(self) -> Path:
        return (self.shared or self.path) / "heartbeat"


def create(path: Path) -> Workdir:
    """Creates the directories of a run that do not exist yet, and calls `refuse_links`."""
    workdir = Workdir(path)
    with explain_write_errors(path):
        # The directory of checkpoints may be a link to another disk; `exist_ok` accepts the link.
        workdir.checkpoints.mkdir(parents=True, exist_ok=True)
    for directory in _directories(workdir):
        check_writable(directory, below=path)
    refuse_links(workdir)
    return workdir


def check_writable(directory: Path, *, below: Path | None = None) -> None:
    """Creates a directory, tests that it is writable, and removes abandoned partial files.

    `below` is the run directory. It is not created: if it is missing, it may have been moved since
    the run began. No part of the path below it may be a link. If `below` is None, the parents of
    `directory` are created, too, and links are allowed.
    """
    with explain_write_errors(directory, existed=below is not None):
        if below is None:
            directory.mkdir(parents=True, exist_ok=True)
        with durable.directory(directory, below=below, make=True):
            tempfile.TemporaryFile(dir=directory).close()
            durable.remove_abandoned(directory)
    storage.of(directory).probe()


def refuse_links(workdir: Workdir) -> None:
    """Raises ConfigError if a path that a run writes to is a link; `checkpoints` may be a link.

    TensorBoard, the profiler and tracking services also write to these paths, and follow links.
    """
    path = workdir.path
    with explain_write_errors(path):
        found = [file for file in path.iterdir() if file.is_symlink() and _WRITTEN(file.name)]
        for directory in (*_directories(workdir), workdir.heartbeat):
            found += durable.links(directory)
        for link in found:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(link))


def _directories(workdir: Workdir) -> tuple[Path, ...]:
    w = workdir
    return w.tokenizer, w.tensorboard, w.samples, w.evaluations, w.plots


def saved_config(path: Path | str) -> Config | None:
    """Returns the config of the run in a directory; None if the directory contains no run."""
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
    """Context that locks a run directory; the lock ends with the process, even if it is killed.

    `warn` is called with a message if the previous trainer did not end in an orderly way, or if the
    file system has no locks. ConfigError is raised if another trainer holds the lock.
    """
    path = workdir.path / ".lock"
    with contextlib.ExitStack() as stack:
        stack.enter_context(storage.of(workdir.path).held(warn))
        with explain_write_errors(workdir.path):
            file = stack.enter_context(durable.open_file(path, "ab+", buffering=0))
            try:
                locked = durable.acquire_lock(file)
            except BlockingIOError as error:
                raise ConfigError(
                    f"{workdir.path} is in use by another trainer "
                    f"({_holder(file) or 'starting'}); wait for it, stop it, or choose another "
                    "--workdir"
                ) from error
            if not locked:
                warn(
                    f"{path} cannot be locked on this file system; do not start a second trainer "
                    "here"
                )
            # A trainer that ends in an orderly way leaves an empty lock file.
            if holder := _holder(file):
                elsewhere = f" on {socket.gethostname()}, " not in holder
                warn(
                    f"taking over from a trainer that was killed ({holder})"
                    + "; it ran on another host, so make sure that it has ended" * elsewhere
                )
            file.truncate(0)
            holder = f"process {os.getpid()} on {socket.gethostname()}, started {current_time()}"
            file.write(holder.encode())
            _remove_partial_files(workdir)

        # An empty lock file shows that the trainer was not killed.
        def empty() -> None:
            with explain_write_errors(path, writable=True):
                file.truncate(0)

        stack.enter_context(closing(empty))
        yield


def _remove_partial_files(workdir: Workdir) -> None:
    """Removes partial files of a killed trainer."""
    w = workdir
    directories = w.path, w.tokenizer, w.samples, w.plots, w.heartbeat
    for path in itertools.chain.from_iterable(map(durable.partial_files, directories)):
        path.unlink(missing_ok=True)
    # Other commands may be writing to `evaluations` now, so only abandoned files are removed there.
    for directory in (workdir.evaluations, *workdir.evaluations.glob("*")):
        durable.remove_abandoned(directory)


def write_json(path: Path, content: Any, *, below: Path | None = None) -> None:
    write_text(path, json.dumps(content, indent=1) + "\n", below=below)


def write_text(path: Path, text: str, *, below: Path | None = None) -> None:
    """Writes text as UTF-8 (see `write_bytes`); escapes bytes of file names that are not UTF-8."""
    write_bytes(path, text.encode("utf-8", "backslashreplace"), below=below)


def write_bytes(path: Path, content: bytes, *, below: Path | None = None) -> None:
    """Writes a file atomically, so that no reader sees half of it.

    No part of the path below the run directory `below` may be a link. If `below` is None, only the
    file itself must not be a link. Errors are raised as by `explain_write_errors` for a path
    that was writable before.
    """
    with explain_write_errors(path, existed=below is not None, writable=True):
        durable.write(path, content, below=below)


def _holder(file: IO) -> str:
    file.seek(0)
    return file.read(_LONGEST_HOLDER).decode(errors="replace").strip()
