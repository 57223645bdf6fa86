"""Turns errors of writing into errors whose sentence names a path and a remedy."""

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from brt import durable
from brt.errors import BrtError, CheckpointError, ConfigError


@contextlib.contextmanager
def explain_write_errors(path: Path, *, existed: bool = False) -> Iterator[None]:
    """Context that turns an OSError into an error whose message names a path and a remedy.

    It is a CheckpointError if the same command may succeed later (the storage fails), or if a run
    directory that `existed` when the command began is gone; otherwise a ConfigError.
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
        raise _unwritable(path, error) from error


@contextlib.contextmanager
def permission_errors_as_checkpoint_errors(path: Path) -> Iterator[None]:
    """Context that turns a PermissionError into a CheckpointError.

    The path was writable when the run started, so permission may be restored.
    """
    try:
        yield
    except PermissionError as error:
        raise CheckpointError(
            f"cannot write to {path}: {error.strerror}; permit it again, then run again"
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
