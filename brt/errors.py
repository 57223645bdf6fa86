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
    """A flag, a setting, or a combination of settings that is not valid."""

    exit_code = 2


class UnsupportedError(BrtError, NotImplementedError):
    """An implementation that an operation does not have, or that cannot handle these inputs."""

    exit_code = 2


class DataError(BrtError, ValueError):
    """Data that cannot be read: a document, prepared data, or a tokenizer."""

    exit_code = 3


class CheckpointError(BrtError):
    """A checkpoint that is missing, damaged or belongs to another run; or a save that failed."""

    exit_code = 4


class NonFiniteError(BrtError):
    """The loss or a gradient became NaN or infinite, or the loss jumped."""

    exit_code = 5


class Preempted(BrtError):
    """SIGTERM or Ctrl-C: all finished work is saved, and the same command continues."""

    exit_code = 75


class PeerError(Preempted):
    """Another process of the run has ended; all saved work is complete, run the command again."""


@contextlib.contextmanager
def closing(close: Callable[[], object]) -> Iterator[None]:
    """Calls `close` after a block; if both fail, the error of the block is raised."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError, BrtError):
            close()
        raise
    close()
