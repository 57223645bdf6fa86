"""Threads that cannot be stopped, and how a process that has such threads ends."""

import os
import sys
import threading
from typing import NoReturn

_hanging: list[threading.Thread] = []


def join(thread: threading.Thread, seconds: int | float) -> None:
    """Waits until a daemon thread ends; `leave` takes care of it if it does not end in time.

    Args:
      thread: the thread, which has been asked to end.
      seconds: how long to wait.
    """
    thread.join(seconds)
    if thread.is_alive():
        _hanging.append(thread)


def leave(code: int) -> NoReturn:
    """Exits with a code.

    A thread that waits in C++ code, for example for a process that is gone, may return while
    Python shuts down. Python then ends the thread in a way that aborts the whole process, with
    exit code 134. If there is such a thread, the process therefore ends without that shutdown.

    Args:
      code: the exit code.

    Raises:
      SystemExit: no thread hangs.
    """
    if any(thread.is_alive() for thread in _hanging):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
