"""Runs `python -m brt.train` and injects a fault when it enters a phase.

python struck.py PHASE COUNT FAULT PROCESS flags of brt.train

The fault strikes when the process of this number enters the phase for the COUNT-th time, in the
thread that enters it, before anything is done in the phase.
"""

import contextlib
import os
import runpy
import signal
import sys
import time
from pathlib import Path

from brt.training import watchdog
from brt.training.progress import PhaseTracker, RunStatus


def send(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.3)  # Gives the thread that handles signals time to run.


def fill() -> None:
    """Fills the file system of the workdir."""
    workdir = next(flag for flag in sys.argv if flag.startswith("--workdir=")).partition("=")[2]
    with Path(workdir).parent.joinpath("filler").open("ab", buffering=0) as file:
        size = 1 << 16
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2


_watched: list[tuple[PhaseTracker, Path]] = []


def hang() -> None:
    """Hangs. The watchdog gets a short limit only now, because a busy machine may be slow."""
    with contextlib.ExitStack() as stack:
        for phases, stacks in _watched:
            stack.enter_context(_watching(phases, 0.2, stacks))
        time.sleep(100_000)


def _later(phases: PhaseTracker, seconds: float, stacks: Path) -> contextlib.AbstractContextManager:
    _watched.append((phases, stacks))
    return contextlib.nullcontext()


_watching = watchdog.watching
FAULTS = {
    "kill": lambda: send(signal.SIGKILL),
    "terminate": lambda: send(signal.SIGTERM),
    "interrupt": lambda: send(signal.SIGINT),
    "stop": lambda: send(signal.SIGSTOP),
    "hang": hang,
    "sleep": lambda: time.sleep(100_000),
    "full": fill,
}


def main() -> None:
    phase, count, fault, process = sys.argv[1:5]
    sys.argv[:] = ["brt.train", *sys.argv[5:]]
    if f"--process_index={process}" in sys.argv or "--process_count" not in " ".join(sys.argv):
        strike(phase, int(count), FAULTS[fault])
        if fault == "hang":
            watchdog.watching = _later
    runpy.run_module("brt.train", run_name="__main__", alter_sys=True)


def strike(phase: str, count: int, fault: object) -> None:
    make, seen = PhaseTracker.__init__, []

    def heard(now: RunStatus) -> None:
        # Only a running watchdog ends a process that hangs.
        unwatched = fault is hang and not _watched
        if phase in (now.phase, now.background) and not unwatched:
            seen.append(now)
            if len(seen) == count:
                print(f"struck: {phase} after step {now.step}", file=sys.stderr, flush=True)
                fault()

    def struck(self: PhaseTracker, **began: float | None) -> None:
        make(self, **began)
        self.listen(heard)
        heard(self.now)

    PhaseTracker.__init__ = struck


if __name__ == "__main__":
    main()
