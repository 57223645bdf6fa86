"""Prints what commands say, and writes the files that their flags name.

No other module prints. Texts may contain names that other people chose, so they are escaped here.
"""

import contextlib
import errno
import io
import json
import logging
import os
import re
import select
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from brt import __version__, durable
from brt.errors import ConfigError
from brt.formatting import finite, printable, sentence

# These flags name files that a command writes at its end. At its start, the command checks whether
# the files can be written.
FLAGS = {"json", "save_state"}


def show(text: str, end: str = "\n") -> None:
    """Prints a result, which may have several lines, to stdout."""
    print(printable(text), end=end, flush=True)


def say(message: str, stream: io.TextIOBase | TextIO | None = None) -> None:
    """Prints a message of one line to stderr, or to another stream."""
    print(sentence(message), file=stream or sys.stderr, flush=True)


def pass_on(text: str, end: str = "") -> None:
    """Prints a text for other programs, such as a script; it is escaped only on a terminal."""
    print(printable(text) if sys.stdout.isatty() else text, end=end, flush=True)


def say_warnings() -> None:
    """Prints each of Python's warnings once, as a message of one line."""
    said = set()

    def warn(message: Warning | str, *_: Any, **__: Any) -> None:
        text = kind = str(message)
        # If JAX's cache of compiled programs fails, JAX warns for every program. All these warnings
        # count as one.
        if found := re.match("Error (?:reading|writing) persistent compilation cache.*?': ", text):
            kind = "cache"
            text = (
                "compiled programs are not cached, so later commands compile them again "
                f"({text[found.end() :]}); XDG_CACHE_HOME can name another directory"
            )
        if kind not in said:
            said.add(kind)
            say(f"brt: warning: {text}")

    warnings.showwarning = warn


def open_streams() -> None:
    """Opens closed standard streams as /dev/null, and lets stdout print any text.

    If a standard stream stayed closed, the next file that brt opens would take its place.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    sys.stdin = sys.stdin or open(0)
    sys.stdout = sys.stdout or open(1, "w")
    sys.stderr = sys.stderr or open(2, "w")
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # Characters that the encoding of the terminal lacks are printed as escapes.
        sys.stdout.reconfigure(errors="backslashreplace")


def silence_later_errors() -> None:
    """Silences the tracebacks that follow the first of several parallel errors.

    The first array that cannot be saved or read raises an error where brt waits for the result. The
    errors of other arrays arrive later, in threads of TensorStore or in coroutines that are closed
    early, and Python would print their tracebacks.
    """
    report = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        error, thread = unraisable.exc_value, threading.current_thread()
        late = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
        closed = isinstance(error and error.__cause__, GeneratorExit)
        if not closed and (not late or thread is threading.main_thread()):
            report(unraisable)

    sys.unraisablehook = hook
    logging.getLogger("asyncio").addFilter(_is_not_late)


def _is_not_late(record: logging.LogRecord) -> bool:
    """Returns False for asyncio's reports of exceptions that nobody retrieved."""
    return "exception was never retrieved" not in record.getMessage()


def reader_is_gone() -> bool:
    """Returns True, and discards all later output, if the reader of stdout (`| head`) is gone."""
    output = sys.stdout.fileno()
    poll = select.poll()
    poll.register(output, select.POLLERR)
    gone = bool(poll.poll(0))
    if gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return gone


def check_files(flags: Mapping[str, Any]) -> None:
    """Raises ConfigError if a flag names a file that cannot be written.

    `flags` maps the names of flags to their values.
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
    """Context in which the file that a flag names is written; OSErrors become ConfigErrors.

    An OSError is raised unchanged if the storage has failed, if it denies access that it allowed
    when `check_files` was called, or if the reader of standard output has ended.
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
    """Writes the JSON file that --json names: `content` with the run's name and brt's version.

    A regular file is replaced atomically. Anything else, such as a FIFO, is written directly.
    """
    run = Path(workdir).resolve().name if workdir else None
    text = json.dumps(finite({"run": run, "version": __version__, **content}), indent=2) + "\n"
    with explained("json", path), durable.named_by_user(Path(path)) as file:
        file.write(text.encode())
