"""Defines the errors that end a command with one sentence and an exit code.

Any other exception is a bug in brt and is shown with its traceback.
"""

import contextlib
from collections.abc import Callable, Iterator

from brt.formatting import sentence


class BrtError(Exception):
    """The base class of errors for users.

    The text of an error is one line of printable characters, even if it quotes several lines of a
    library. The middle of long values is left out.
    """

    exit_code = 1  # The error ends a command with this exit code.

    def __str__(self) -> str:
        return sentence(super().__str__())


class ConfigError(BrtError, ValueError):
    """An error which says that a flag, a setting, or a combination of settings is not valid."""

    exit_code = 2


class UnsupportedError(BrtError, NotImplementedError):
    """An error which says that an operation lacks an implementation for the requested inputs."""

    exit_code = 2


class DataError(BrtError, ValueError):
    """An error which says that a document, prepared data, or a tokenizer cannot be read."""

    exit_code = 3


class CheckpointError(BrtError):
    """An error which says that a checkpoint is missing, is damaged, belongs to another run, or was
    not saved.
    """

    exit_code = 4


class BucketError(BrtError):
    """An error which says that a request to a bucket failed, and may succeed later."""

    exit_code = 4


class NonFiniteError(BrtError):
    """An error which says that the loss jumped, or that the loss or a gradient is not finite."""

    exit_code = 5


class Preempted(BrtError):
    """An error which says that SIGTERM or Ctrl-C ended the run. The same command continues it."""

    exit_code = 75


class PeerError(Preempted):
    """An error which says that another process of the run ended. The same command continues it."""


@contextlib.contextmanager
def closing(close: Callable[[], object]) -> Iterator[None]:
    """Context that calls `close` when its block ends.

    If the block raises an exception, OSErrors and BrtErrors of `close` are ignored.
    """
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError, BrtError):
            close()
        raise
    close()
