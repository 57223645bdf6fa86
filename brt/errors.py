"""Errors that end a command with one sentence and an exit code.

Any other exception is a bug in brt and is shown with its traceback.
"""

import contextlib
from collections.abc import Callable, Iterator

from brt.formatting import printable


class BrtError(Exception):
    """Base class of errors for users; `exit_code` is the exit code of the command.

    The text is one line of printable characters, even if it quotes several lines of a library.
    """

    exit_code = 1

    def __str__(self) -> str:
        return printable(" ".join(super().__str__().splitlines()))


class ConfigError(BrtError, ValueError):
    """The error that a flag, a setting, or a combination of settings is not valid."""

    exit_code = 2


class UnsupportedError(BrtError, NotImplementedError):
    """The error that an operation has no such implementation, or that it cannot handle these
    inputs.
    """

    exit_code = 2


class DataError(BrtError, ValueError):
    """The error that data cannot be read: a document, prepared data, or a tokenizer."""

    exit_code = 3


class CheckpointError(BrtError):
    """The error that a checkpoint is missing, damaged or of another run, or that a save failed."""

    exit_code = 4


class NonFiniteError(BrtError):
    """The error that the loss or a gradient became NaN or infinite, or that the loss jumped."""

    exit_code = 5


class Preempted(BrtError):
    """The error that SIGTERM or Ctrl-C ended the run; all finished work is saved.

    The same command continues the run.
    """

    exit_code = 75


class PeerError(Preempted):
    """The error that another process of the run has ended; all saved work is complete.

    The same command continues the run.
    """


@contextlib.contextmanager
def closing(close: Callable[[], object]) -> Iterator[None]:
    """Context that calls `close` at its end; if both fail, the error of the block is raised."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError, BrtError):
            close()
        raise
    close()
