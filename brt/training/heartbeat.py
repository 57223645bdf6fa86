"""A small file that says what a process does now, for whoever watches from outside."""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from brt import durable
from brt.training.phases import Phases, RunStatus

EVERY_SECONDS = 5.0


@contextlib.contextmanager
def written(path: Path, phases: Phases) -> Iterator[None]:
    """Keeps a file of JSON up to date: at each new phase, and every few seconds; "ended" behind it.

    It holds `phase`, `beside` (what a thread does meanwhile), `step` (completed ones), `moved`
    (when there was a sign of life) and `time` (when it was written), both in seconds since 1970,
    `pid` and `host`. A reader never sees half of it. Where it cannot be written training goes on:
    an old `time` says so.
    """
    over, changed = threading.Event(), threading.Event()
    phases.listen(lambda now: changed.set())

    def keep() -> None:
        while not over.is_set():
            _write(path, phases.now)
            changed.wait(EVERY_SECONDS)
            changed.clear()
        _write(path, phases.now._replace(phase="ended"))

    thread = threading.Thread(target=keep, name="heartbeat file", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        changed.set()
        thread.join(EVERY_SECONDS)  # a file system that hangs holds nobody up


def _write(path: Path, now: RunStatus) -> None:
    seconds = time.time()
    content = {
        "phase": now.phase,
        "beside": now.beside,
        "step": now.step,
        "moved": round(seconds - (time.monotonic() - now.moved), 3),
        "time": round(seconds, 3),
        "pid": os.getpid(),
        "host": socket.gethostname(),
    }
    workdir = path.parent.parent
    with contextlib.suppress(OSError):  # a full disk; the checkpoints say so
        with (
            durable.directory(path.parent, below=workdir, make=True),
            durable.replacing(path, below=workdir, synced=False) as file,  # it is of this moment
        ):
            file.write(json.dumps(content).encode() + b"\n")
