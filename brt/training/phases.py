"""Tracks the phase that a run is in, such as compiling or evaluating.

The training loop sets the phase. The watchdog, which ends a run that hangs, the heartbeat file and
the progress bar read the phase.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

# In these phases a run shows no sign of progress until the phase ends.
WITHOUT_PROGRESS = (
    "starting", "compiling", "restoring", "seeking", "saving", "committing", "ending",
)  # fmt: skip
# In these phases a run regularly checks for requests to stop.
_INTERRUPTIBLE = ("stepping", "evaluating", "sampling")


class RunStatus(NamedTuple):
    """The activity of a run at one moment."""

    # "starting", "compiling", "restoring" (a checkpoint), "seeking" (the position in the data),
    # "stepping" (training), "evaluating", "sampling", "saving" (copying the arrays for a
    # checkpoint), "committing" (completing a checkpoint) or "ending".
    phase: str
    step: int  # number of completed training steps
    # The time (`time.monotonic`) of the last sign of progress, such as a completed step, an
    # evaluated batch, a sampled token, or the beginning of a phase.
    last_progress: float
    background: str = ""  # the phase of the thread that saves in the background; "" while idle


class PhaseTracker:
    """Holds the current status of a run, and notifies listeners of new phases.

    The main thread changes the status. Every thread may read the status (`now`), because it is a
    single value that is replaced as a whole. A `step` of None leaves the number of completed steps
    as it is.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._listeners: list[Callable[[RunStatus], None]] = []
        self._background = ""
        self._status = RunStatus("starting", 0, clock())

    @property
    def now(self) -> RunStatus:
        return self._status._replace(background=self._background)

    def listen(self, listener: Callable[[RunStatus], None]) -> None:
        """Registers a function to call when a phase, or work in the background, begins or ends."""
        self._listeners.append(listener)

    def enter(self, phase: str, step: int | None = None) -> None:
        completed = self._status.step if step is None else step
        self._status = RunStatus(phase, completed, self._clock())
        self._notify()

    @contextlib.contextmanager
    def during(self, phase: str, step: int | None = None) -> Iterator[None]:
        """Context that begins a phase, and begins the previous phase again at the context's end.

        If an error is raised within the context, the status keeps the phase of the error.
        """
        previous = self._status.phase
        self.enter(phase, step)
        yield
        self.enter(previous)

    @contextlib.contextmanager
    def in_background(self, phase: str) -> Iterator[None]:
        """Context that sets `background` of the status, for the thread that saves."""
        self._background = phase
        self._notify()
        try:
            yield
        finally:
            self._background = ""
            self._notify()

    def progressed(self, step: int | None = None) -> None:
        """Records progress within a phase; cheap enough to be called for every step or batch."""
        completed = self._status.step if step is None else step
        self._status = self._status._replace(step=completed, last_progress=self._clock())

    @property
    def uninterruptible(self) -> str:
        """Name of the current phase if a request to stop has to wait for its end; otherwise ""."""
        return "" if self._status.phase in _INTERRUPTIBLE else self._status.phase

    def _notify(self) -> None:
        for listener in self._listeners:
            listener(self.now)
