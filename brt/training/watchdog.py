"""Ends a process that makes no progress, and says where it is stuck."""

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
from brt.training.phases import SILENT, Phases, RunStatus
from brt.training.workdir import Workdir

HUNG = 70  # exit code: EX_SOFTWARE of sysexits.h
PATIENCE = 4  # times as long for phases that give no sign of life until they are over
_LOOKS = 10  # within the limit
_LONGEST_LOOK = 5.0  # seconds
_GOODBYE_SECONDS = 5.0
_SLACK = 10.0  # seconds that a busy machine may keep our thread waiting
_STDERR = 2  # by its number: who runs this may have put something else in sys.stderr's place


@contextlib.contextmanager
def attended(workdir: Workdir, phases: Phases, seconds: int) -> Iterator[None]:
    """A run whose phases are in its heartbeat files and known to its other processes, watched."""
    own = str(jax.process_index())
    processes.tell(lambda: _described(phases.now))
    with (
        heartbeat.written(workdir.heartbeat / f"{own}.json", phases),
        watching(phases, float(seconds), workdir.heartbeat / f"{own}.stacks.txt"),
    ):
        yield


@contextlib.contextmanager
def watching(phases: Phases, seconds: float, stacks: Path) -> Iterator[None]:
    """Ends this process with HUNG where it shows no sign of life for `seconds`.

    Such a sign is a step, a batch of an evaluation, a token of a sample, or another phase; phases
    that have none (`phases.SILENT`) may take PATIENCE times as long. Time in which the whole
    process stood still (Ctrl-Z) does not count, unless it is more than twice the limit. All
    Python stacks go to stderr and into the file `stacks`. A thread does this, so that the main
    one may be stuck in C; where that keeps Python's lock and no thread can run, `faulthandler`
    shows them after little more than twice the limit, and the exit code is 1.

    Args:
      seconds: 0: nobody watches.
    """
    if not seconds:
        yield
        return
    over = threading.Event()
    with contextlib.suppress(OSError):
        stacks.unlink()  # of a run before

    def dump_where_python_cannot(limit: float) -> None:
        faulthandler.dump_traceback_later(2 * limit + _SLACK, exit=True, file=_STDERR)

    def watch() -> None:
        pause = min(seconds / _LOOKS, _LONGEST_LOOK)
        seen, still, before = phases.now, 0.0, time.monotonic()
        while not over.wait(pause):
            now, at = phases.now, time.monotonic()
            still = still + min(at - before, 2 * pause) if now.moved == seen.moved else 0.0
            seen, before = now, at
            limit = seconds * (PATIENCE if now.phase in SILENT else 1)
            dump_where_python_cannot(limit)
            if still > limit:
                _end(now, still, stacks)

    dump_where_python_cannot(PATIENCE * seconds)
    thread = threading.Thread(target=watch, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        faulthandler.cancel_dump_traceback_later()


def _end(now: RunStatus, still: float, stacks: Path) -> None:
    what = f"no sign of life for {still:.0f} s while {_described(now)}"
    farewell = threading.Thread(target=processes.say_goodbye, args=[what], daemon=True)
    farewell.start()
    faulthandler.dump_traceback(_STDERR, all_threads=True)
    where = "the stacks are above"
    with contextlib.suppress(OSError):  # a full disk must not keep it alive
        with durable.open_file(stacks, "w", below=stacks.parent.parent) as file:
            faulthandler.dump_traceback(file, all_threads=True)
        where += f" and in {stacks}"
    known = "".join(f"; {one}" for one in processes.last_words())
    print(
        f"brt: {what}{known}; {where}; run the same command again to go on from the newest "
        "checkpoint (Training.watchdog_seconds is the limit)", file=sys.stderr, flush=True,
    )  # fmt: skip
    farewell.join(_GOODBYE_SECONDS)
    os._exit(HUNG)


def _described(now: RunStatus) -> str:
    return f"{now.phase} after step {now.step}"
