"""What a run is doing: the loop says it in one place, and whoever wants to know reads it there."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

# In which a run shows no sign of being alive until they are over.
SILENT = ("starting", "compiling", "restoring", "seeking", "saving", "committing", "ending")
_STOPS = ("stepping", "evaluating", "sampling")  # in which it looks whether it is asked to stop


class RunStatus(NamedTuple):
    """Where a run is.

    Attributes:
      phase: "starting", "compiling", "restoring", "seeking", "stepping", "evaluating",
        "sampling", "saving", "committing" or "ending".
      step: completed ones.
      moved: `time.monotonic` of the last sign of life: a step, a batch, another phase.
      beside: what a thread does meanwhile, "": nothing.
    """

    phase: str
    step: int
    moved: float
    beside: str = ""


class Phases:
    """The phase that a run is in. One thread changes it; all may read `now`, which is one value."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._listeners: list[Callable[[RunStatus], None]] = []
        self._beside = ""
        self._moment = RunStatus("starting", 0, clock())

    @property
    def now(self) -> RunStatus:
        """Where the run is."""
        return self._moment._replace(beside=self._beside)

    def listen(self, listener: Callable[[RunStatus], None]) -> None:
        """Calls `listener` whenever another phase begins, before anything is done in it."""
        self._listeners.append(listener)

    def enter(self, phase: str, step: int | None = None) -> None:
        """Begins a phase."""
        done = self._moment.step if step is None else step
        self._moment = RunStatus(phase, done, self._clock())
        self._tell()

    @contextlib.contextmanager
    def during(self, phase: str, step: int | None = None) -> Iterator[None]:
        """A phase with an end, behind which the one before it goes on."""
        before = self._moment.phase
        self.enter(phase, step)
        yield  # what fails stays in its phase
        self.enter(before)

    @contextlib.contextmanager
    def beside(self, phase: str) -> Iterator[None]:
        """What another thread does while the phase goes on."""
        self._beside = phase
        self._tell()
        try:
            yield
        finally:
            self._beside = ""
            self._tell()

    def moved(self, step: int | None = None) -> None:
        """A sign of life: a step is done, or a batch of an evaluation; cheap, for every one."""
        done = self._moment.step if step is None else step
        self._moment = self._moment._replace(step=done, moved=self._clock())

    @property
    def waits(self) -> str:
        """What a request to stop has to wait for, "": nothing."""
        return "" if self._moment.phase in _STOPS else self._moment.phase

    def _tell(self) -> None:
        for listener in self._listeners:
            listener(self.now)
