"""Ends a process that makes no progress, and reports where it is stuck.

The module also writes a small file about what the process is doing, for monitoring.
"""

import contextlib
import faulthandler
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jax

from brt import durable, output, runtime, storage
from brt.distributed import processes
from brt.training.progress import WITHOUT_PROGRESS, PhaseTracker, RunStatus
from brt.training.workdir import Workdir

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
    with runtime.repeating(
        lambda: _write(path, phases.now), EVERY_SECONDS, "heartbeat file",
        lambda: _write(path, phases.now._replace(phase="ended")),
    ) as write_now:  # fmt: skip
        phases.listen(lambda now: write_now())
        yield


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


HUNG = 70  # A process that hung ends with this exit code (EX_SOFTWARE of sysexits.h).
# Phases that show no progress until they end may take this number of times the time limit.
PATIENCE = 4
# The watchdog checks the progress _CHECKS times within the time limit, but at least every
# _LONGEST_PAUSE seconds.
_CHECKS = 10
_LONGEST_PAUSE = 5.0
# Before the watchdog ends its process, it announces the reason to the other processes of the run,
# and waits at most this number of seconds for the announcement.
_GOODBYE_SECONDS = 5.0
# It also waits at most this number of seconds until the stacks are copied to the bucket of the run.
_PUBLISHING_SECONDS = 20.0
# A timer outside of Python ends the process if a thread does not restart the timer in time. This
# number of seconds is added to the timer, because a busy machine may delay the thread.
_SLACK = 10.0
# Stacks are written to this file descriptor, because sys.stderr may have been replaced.
_STDERR = 2


@contextlib.contextmanager
def monitored(workdir: Workdir, phases: PhaseTracker, seconds: int) -> Iterator[None]:
    """Context in which this process writes a heartbeat file, and a watchdog checks its progress.

    `seconds` is Training.watchdog_seconds, which is passed to `watching`.
    """
    index = str(jax.process_index())
    if processes.heartbeat:
        processes.heartbeat.doing = lambda: _described(phases.now)
    with (
        write_regularly(workdir.heartbeat / f"{index}.json", phases),
        watching(phases, float(seconds), workdir.heartbeat / f"{index}.stacks.txt"),
    ):
        yield


@contextlib.contextmanager
def watching(phases: PhaseTracker, seconds: float, stacks: Path) -> Iterator[None]:
    """Context in which a thread ends this process if the process makes no progress for too long.

    The time without progress is limited to `seconds`; 0 means no limit. Progress is a completed
    step, an evaluated batch, a sampled token or the beginning of a phase. Phases without such signs
    (`WITHOUT_PROGRESS`) may take PATIENCE times as long. Time in which the whole process is
    suspended (Ctrl-Z) does not count, unless it exceeds twice the limit. Before the process ends
    with the exit code HUNG, the stacks of all Python threads are written to stderr and to the file
    `stacks`.

    A thread watches the progress, because the main thread may be stuck in C code. If the C code
    holds Python's global interpreter lock, no thread can run. In this case `faulthandler`, which
    needs no lock, writes the stacks to stderr after little more than twice the limit, and the exit
    code is 1.
    """
    if not seconds:
        yield
        return
    with contextlib.suppress(OSError):
        stacks.unlink()  # The file may be left from an earlier start of the run.
    pause = min(seconds / _CHECKS, _LONGEST_PAUSE)
    previous, idle, checked = phases.now, 0.0, time.monotonic()

    def watch() -> None:
        nonlocal previous, idle, checked
        status, clock = phases.now, time.monotonic()
        idle += min(clock - checked, 2 * pause)
        if status.last_progress != previous.last_progress:
            idle = 0.0
        previous, checked = status, clock
        limit = seconds * (PATIENCE if status.phase in WITHOUT_PROGRESS else 1)
        # This call restarts a timer that works even if C code holds the global interpreter lock.
        faulthandler.dump_traceback_later(2 * limit + _SLACK, exit=True, file=_STDERR)
        if idle > limit:
            _end(status, idle, stacks)

    watch()  # This call sets the timer before code can hold the lock.
    try:
        with runtime.repeating(watch, pause, "watchdog"):
            yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _end(now: RunStatus, idle: float, stacks: Path) -> None:
    """Reports where the process is stuck, and ends it, without waiting long for any operation."""
    reason = f"no sign of life for {idle:.0f} s while {_described(now)}"
    goodbye = threading.Thread(target=processes.announce_end, args=[reason], daemon=True)
    goodbye.start()
    faulthandler.dump_traceback(_STDERR, all_threads=True)
    where = "the stacks are above"
    with contextlib.suppress(OSError):  # A full disk must not keep the process alive.
        with durable.open_file(stacks, "w", below=stacks.parent.parent) as file:
            faulthandler.dump_traceback(file, all_threads=True)
        if _published(stacks):
            where += f" and in {stacks}"
    beats = processes.heartbeat
    others = "".join(f"; {words}" for words in beats.last_activities()) if beats else ""
    output.say(
        f"brt: {reason}{others}; {where}; run the same command again to go on from the newest "
        "checkpoint (Training.watchdog_seconds is the limit)"
    )
    goodbye.join(_GOODBYE_SECONDS)
    os._exit(HUNG)


def _published(stacks: Path) -> bool:
    """Copies a file to the bucket of the run, if the run has one; returns False if this fails."""
    done = threading.Event()

    def publish() -> None:
        with contextlib.suppress(Exception):
            storage.of(stacks).publish_file(stacks)
            done.set()

    # The timer that ends the process is restarted, because its limit did not allow for this work.
    limit = _PUBLISHING_SECONDS + _GOODBYE_SECONDS + _SLACK
    faulthandler.dump_traceback_later(limit, exit=True, file=_STDERR)
    thread = threading.Thread(target=publish, name="stacks", daemon=True)
    thread.start()
    thread.join(_PUBLISHING_SECONDS)
    return done.is_set()


def _described(now: RunStatus) -> str:
    return f"{now.phase} after step {now.step}"
