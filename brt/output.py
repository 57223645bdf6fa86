"""Where a command's results go: standard streams, and the files that flags name."""

import contextlib
import errno
import io
import json
import logging
import os
import select
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from brt import __version__, durable
from brt.errors import ConfigError
from brt.formatting import finite

FLAGS = {"json", "save_state"}  # what they name is written when all is done


def open_streams() -> None:
    """Closed ones become /dev/null, lest a file of ours takes their number; all take any text."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    sys.stdin = sys.stdin or open(0)
    sys.stdout = sys.stdout or open(1, "w")
    sys.stderr = sys.stderr or open(2, "w")
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may not know all letters


def tell_failures_once() -> None:
    """Leaves out what Python says of errors after the first of several arrays.

    The error of the first array that cannot be saved or read is raised and told by whoever waits
    for it. Those of the others come when nobody waits any more: from TensorStore's threads, or
    from coroutines that are closed before they have ended. They would be tracebacks.
    """
    report = sys.unraisablehook

    def hook(told: Any) -> None:
        error, thread = told.exc_value, threading.current_thread()
        late = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
        closed = isinstance(error and error.__cause__, GeneratorExit)
        if not closed and (not late or thread is threading.main_thread()):
            report(told)

    sys.unraisablehook = hook
    logging.getLogger("asyncio").addFilter(_is_not_late)


def _is_not_late(record: logging.LogRecord) -> bool:
    """Whether a line is no report of an error after the first, for which nobody waits any more."""
    return "exception was never retrieved" not in record.getMessage()


def reader_is_gone() -> bool:
    """Whether `| head` has read enough; then nothing more is written, not even at exit."""
    output = sys.stdout.fileno()
    poll = select.poll()
    poll.register(output, select.POLLERR)
    gone = bool(poll.poll(0))
    if gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return gone


def check_files(flags: Mapping[str, Any]) -> None:
    """Checks, before a command works, that the files which its flags name can be written.

    Raises:
      ConfigError: one cannot be written, for instance because access is denied.
      OSError: the storage fails.
    """
    for flag in sorted(FLAGS & flags.keys()):
        if not (path := flags[flag] and Path(flags[flag])):
            continue
        try:
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            if durable.is_regular_or_new(path):
                place = os.path.dirname(os.path.realpath(path))
                tempfile.TemporaryFile(dir=place).close()
                durable.remove_abandoned(Path(place))
            elif not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            if durable.storage_fails(error):
                raise
            raise _unwritable(flag, path, error) from error


@contextlib.contextmanager
def explained(flag: str, path: str | Path) -> Iterator[None]:
    """A block that writes the file which a flag names, and which `check_files` has checked.

    Raises:
      ConfigError: it cannot be written there.
      OSError: the storage fails or denies access by now, or nobody reads any more.
    """
    try:
        yield
    except OSError as error:
        if durable.storage_refuses(error) or _is_stdout_gone(path, error):
            raise
        raise _unwritable(flag, path, error) from error


def _unwritable(flag: str, path: str | Path, error: OSError) -> ConfigError:
    return ConfigError(f"--{flag}={path} cannot be written: {error.strerror}")


def _is_stdout_gone(path: str | Path, error: OSError) -> bool:
    return isinstance(error, BrokenPipeError) and os.path.samestat(os.stat(path), os.fstat(1))


def write_json(path: str | Path, content: Mapping[str, Any], workdir: str | None) -> None:
    """Writes `content` for --json=FILE, whole or not at all, with the run's name and brt's version.

    What is no regular file is written into (see `durable.named_by_user`); raises as `explained`.
    """
    run = Path(workdir).resolve().name if workdir else None
    text = json.dumps(finite({"run": run, "version": __version__, **content}), indent=2) + "\n"
    with explained("json", path), durable.named_by_user(Path(path)) as file:
        file.write(text.encode())
