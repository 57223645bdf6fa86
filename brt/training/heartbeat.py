"""Writes a small file that says what a process is doing, for monitoring from outside."""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from brt import durable, hanging
from brt.training.phases import PhaseTracker, RunStatus

EVERY_SECONDS = 5.0


@contextlib.contextmanager
def write_regularly(path: Path, phases: PhaseTracker) -> Iterator[None]:
    """Context in which a thread writes the status of the run to a JSON file again and again.

    The file is written at the beginning of each phase and every EVERY_SECONDS seconds. Its keys:

        phase   the current phase; "ended" after the context
        step    number of completed steps
        beside  the phase of the thread that saves in the background; "" while that thread is idle
        moved   time of the last progress, in seconds since 1970
        time    time at which the file was written, in seconds since 1970
        pid     number of the process
        host    name of the machine

    The file is replaced as a whole, so that no reader sees half of it. If the file cannot be
    written, training continues.
    """
    over, changed = threading.Event(), threading.Event()
    phases.listen(lambda now: changed.set())

    def keep_updated() -> None:
        while not over.is_set():
            _write(path, phases.now)
            changed.wait(EVERY_SECONDS)
            changed.clear()
        _write(path, phases.now._replace(phase="ended"))

    thread = threading.Thread(target=keep_updated, name="heartbeat file", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        changed.set()
        # The main thread waits for a limited time only, because the file system may hang.
        hanging.join(thread, EVERY_SECONDS)


def _write(path: Path, now: RunStatus) -> None:
    seconds = time.time()
    content = {
        "phase": now.phase,
        "beside": now.background,
        "step": now.step,
        "moved": round(seconds - (time.monotonic() - now.last_progress), 3),
        "time": round(seconds, 3),
        "pid": os.getpid(),
        "host": socket.gethostname(),
    }
    workdir = path.parent.parent
    # Errors such as a full disk are ignored here, because saving a checkpoint reports them.
    with contextlib.suppress(OSError):
        # The file is not flushed to the disk, because it is soon replaced.
        with (
            durable.directory(path.parent, below=workdir, make=True),
            durable.replacing(path, below=workdir, synced=False) as file,
        ):
            file.write(json.dumps(content).encode() + b"\n")
