"""Ends a process that makes no progress, and reports where it is stuck."""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jax

from brt import durable
from brt.distributed import processes
from brt.training import heartbeat
from brt.training.phases import WITHOUT_PROGRESS, PhaseTracker, RunStatus
from brt.training.workdir import Workdir

HUNG = 70  # The exit code of a process that hung: EX_SOFTWARE of sysexits.h.
# Phases that show no progress until they end may take this multiple of the limit.
PATIENCE = 4
_CHECKS = 10  # The number of checks within the limit.
_LONGEST_PAUSE = 5.0  # The largest number of seconds between two checks.
_GOODBYE_SECONDS = 5.0
_SLACK = 10.0  # The number of seconds that a busy machine may delay the watchdog's thread.
_STDERR = 2  # The file descriptor is used because sys.stderr may have been replaced.


@contextlib.contextmanager
def attended(workdir: Workdir, phases: PhaseTracker, seconds: int) -> Iterator[None]:
    """Context in which this process writes its heartbeat file, and its progress is watched.

    Args:
      workdir: the run directory, whose directory `heartbeat` receives the files.
      phases: the status to report and watch; other processes of the run can ask for it too.
      seconds: Training.watchdog_seconds; see `watching`.
    """
    index = str(jax.process_index())
    processes.report_activity(lambda: _described(phases.now))
    with (
        heartbeat.written(workdir.heartbeat / f"{index}.json", phases),
        watching(phases, float(seconds), workdir.heartbeat / f"{index}.stacks.txt"),
    ):
        yield


@contextlib.contextmanager
def watching(phases: PhaseTracker, seconds: float, stacks: Path) -> Iterator[None]:
    """Context that ends this process with exit code HUNG if it makes no progress for `seconds`.

    Progress is a completed step, an evaluated batch, a sampled token or the beginning of a phase.
    Phases without such signs (`phases.WITHOUT_PROGRESS`) may take PATIENCE times as long. Time in
    which the whole process is suspended (Ctrl-Z) does not count, unless it exceeds twice the limit.
    The stacks of all Python threads go to stderr and to a file.

    A thread watches the progress, so that it works while the main thread is stuck in C code. If
    that code holds Python's lock, no thread can run; then `faulthandler` prints the stacks after
    little more than twice the limit, and the exit code is 1.

    Args:
      phases: the status to watch.
      seconds: the limit; 0 for none.
      stacks: the file that receives the stacks.
    """
    if not seconds:
        yield
        return
    over = threading.Event()
    with contextlib.suppress(OSError):
        stacks.unlink()  # An earlier start of the run may have written the file.

    def exit_without_python(limit: float) -> None:
        """Ends the process after twice the limit, unless called again, even if Python's lock is
        held.
        """
        faulthandler.dump_traceback_later(2 * limit + _SLACK, exit=True, file=_STDERR)

    def watch() -> None:
        """Checks the progress at regular times, and ends the process if there is none."""
        pause = min(seconds / _CHECKS, _LONGEST_PAUSE)
        previous, idle, checked = phases.now, 0.0, time.monotonic()
        while not over.wait(pause):
            now, clock = phases.now, time.monotonic()
            idle += min(clock - checked, 2 * pause)
            if now.last_progress != previous.last_progress:
                idle = 0.0
            previous, checked = now, clock
            limit = seconds * (PATIENCE if now.phase in WITHOUT_PROGRESS else 1)
            exit_without_python(limit)
            if idle > limit:
                _end(now, idle, stacks)

    exit_without_python(PATIENCE * seconds)
    thread = threading.Thread(target=watch, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        faulthandler.cancel_dump_traceback_later()


def _end(now: RunStatus, idle: float, stacks: Path) -> None:
    """Reports where the process is stuck and ends it; nothing here may wait for long."""
    reason = f"no sign of life for {idle:.0f} s while {_described(now)}"
    goodbye = threading.Thread(target=processes.announce_end, args=[reason], daemon=True)
    goodbye.start()
    faulthandler.dump_traceback(_STDERR, all_threads=True)
    where = "the stacks are above"
    with contextlib.suppress(OSError):  # A full disk must not keep the process alive.
        with durable.open_file(stacks, "w", below=stacks.parent.parent) as file:
            faulthandler.dump_traceback(file, all_threads=True)
        where += f" and in {stacks}"
    others = "".join(f"; {words}" for words in processes.last_activities())
    print(
        f"brt: {reason}{others}; {where}; run the same command again to go on from the newest "
        "checkpoint (Training.watchdog_seconds is the limit)", file=sys.stderr, flush=True,
    )  # fmt: skip
    goodbye.join(_GOODBYE_SECONDS)
    os._exit(HUNG)


def _described(now: RunStatus) -> str:
    return f"{now.phase} after step {now.step}"
