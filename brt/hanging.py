"""Ends a process even if some of its threads cannot be stopped."""

import os
import sys
import threading
from typing import NoReturn

_hanging: list[threading.Thread] = []


def join(thread: threading.Thread, seconds: int | float) -> None:
    """Waits for a daemon thread, or remembers it for `leave` after this number of seconds."""
    thread.join(seconds)
    if thread.is_alive():
        _hanging.append(thread)


def leave(code: int) -> NoReturn:
    """Ends the process with an exit code."""
    # A thread that waits in C++ code, for example for a process that is gone, may return while
    # Python shuts down. Python then ends the thread in a way that aborts the whole process, with
    # exit code 134. Such a process therefore ends without shutting down Python.
    if any(thread.is_alive() for thread in _hanging):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
