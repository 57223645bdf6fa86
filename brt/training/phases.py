"""Tracks the phase that a run is in: the training loop sets it, all other parts read it."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

# The phases in which a run makes no visible progress until the phase ends.
WITHOUT_PROGRESS = (
    "starting", "compiling", "restoring", "seeking", "saving", "committing", "ending",
)  # fmt: skip
# The phases that regularly check for requests to stop.
_INTERRUPTIBLE = ("stepping", "evaluating", "sampling")


class RunStatus(NamedTuple):
    """What a run is doing at a moment.

    Attributes:
      phase: "starting", "compiling", "restoring", "seeking", "stepping", "evaluating", "sampling",
        "saving", "committing" or "ending".
      step: number of completed training steps.
      last_progress: `time.monotonic` of the last sign of progress: a completed step, an evaluated
        batch, or the beginning of a phase.
      background: the phase of the thread that saves in the background; "" while that is idle.
    """

    phase: str
    step: int
    last_progress: float
    background: str = ""


class PhaseTracker:
    """The current status of a run.

    The main thread changes the status. Every thread may read `now`, which is replaced as one value
    and therefore never inconsistent.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._listeners: list[Callable[[RunStatus], None]] = []
        self._background = ""
        self._status = RunStatus("starting", 0, clock())

    @property
    def now(self) -> RunStatus:
        """The current status."""
        return self._status._replace(background=self._background)

    def listen(self, listener: Callable[[RunStatus], None]) -> None:
        """Registers a function that is called at the beginning of every phase with the
        new status.
        """
        self._listeners.append(listener)

    def enter(self, phase: str, step: int | None = None) -> None:
        """Begins a phase, with another number of completed steps if `step` is given."""
        completed = self._status.step if step is None else step
        self._status = RunStatus(phase, completed, self._clock())
        self._notify()

    @contextlib.contextmanager
    def during(self, phase: str, step: int | None = None) -> Iterator[None]:
        """Context that enters a phase, and enters the previous phase again at its end.

        If the block raises an error, the status stays in the phase in which the error occurred.
        """
        previous = self._status.phase
        self.enter(phase, step)
        yield
        self.enter(previous)

    @contextlib.contextmanager
    def in_background(self, phase: str) -> Iterator[None]:
        """Context in which `background` of the status is the phase of the calling thread."""
        self._background = phase
        self._notify()
        try:
            yield
        finally:
            self._background = ""
            self._notify()

    def progressed(self, step: int | None = None) -> None:
        """Records progress within a phase; cheap enough to call for every step or batch."""
        completed = self._status.step if step is None else step
        self._status = self._status._replace(step=completed, last_progress=self._clock())

    @property
    def uninterruptible(self) -> str:
        """The current phase if a request to stop has to wait until the phase ends, otherwise ""."""
        return "" if self._status.phase in _INTERRUPTIBLE else self._status.phase

    def _notify(self) -> None:
        for listener in self._listeners:
            listener(self.now)
