"""Errors that end a command with one sentence and an exit code.

Anything else that escapes is a bug in brt and keeps its traceback.
"""

import contextlib
from collections.abc import Callable, Iterator

from brt.formatting import printable


class BrtError(Exception):
    """Base class; `exit_code` is what the command returns.

    Its text is one line of printable characters, whatever lines a library has that it quotes.
    """

    exit_code = 1

    def __str__(self) -> str:
        return printable(" ".join(super().__str__().splitlines()))


class ConfigError(BrtError, ValueError):
    """A flag, binding or combination of settings that cannot work."""

    exit_code = 2


class UnsupportedError(BrtError, NotImplementedError):
    """An implementation that an operation does not have, or that refuses these inputs."""

    exit_code = 2


class DataError(BrtError, ValueError):
    """A document, corpus or tokenizer that cannot be read as asked."""

    exit_code = 3


class CheckpointError(BrtError):
    """A checkpoint that is missing, damaged or of another run; or a save that failed."""

    exit_code = 4


class NonFiniteError(BrtError):
    """Loss or gradients became NaN or infinite, or the loss jumped."""

    exit_code = 5


class Preempted(BrtError):
    """SIGTERM or Ctrl-C: all finished work is saved, run the same command again."""

    exit_code = 75


class PeerError(Preempted):
    """Another process of the run is gone; what was saved is whole, run the same again."""


@contextlib.contextmanager
def closing(close: Callable[[], object]) -> Iterator[None]:
    """Calls `close` behind a block; where both fail the block's error is the one that is raised."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError, BrtError):
            close()
        raise
    close()
