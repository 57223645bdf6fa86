"""What a run is asked for while it goes on: by signals, and by files that appear in its workdir."""

import contextlib
import time
from collections.abc import Callable

from brt.checkpointing import reader
from brt.distributed import processes
from brt.distributed.stopping import Agreed
from brt.training.phases import Phases
from brt.training.preemption import StopSignal
from brt.training.workdir import Workdir

CHECKPOINT = "checkpoint_now"
STOP = "stop_after_evaluation"
_LOOK_SECONDS = 1.0  # network file systems take their time to say what is there
_NEVER = (
    "this run makes no evaluations (Training.evaluate_every, or no held-out data); stop it with "
    "SIGTERM, which saves as well"
)


class Requests:
    """Signals to, and files for, all processes of a run, which do the same at the same step.

    The first process looks for files, the others hear of them. A file is removed when what it
    asks for is done, so that a run which is killed before still owes it.

    Args:
      evaluates: whether the run ever does.
      say: told what was seen and done.
      stack: closes what this opens.
    """

    def __init__(
        self,
        stop: StopSignal,
        workdir: Workdir,
        phases: Phases,
        evaluates: bool,
        say: Callable[[str], None],
        stack: contextlib.ExitStack,
    ):
        self._stop, self._workdir, self._phases, self._say = stop, workdir, phases, say
        self._evaluates = evaluates
        self._next_look, self._seen_stop = 0.0, False
        self._together: tuple[Agreed, Agreed] | None = None
        if processes.several():
            self._together = (
                Agreed("stop", lambda: stop.requested, reader.warn_on_stderr),
                Agreed("checkpoint", self._found_by_first, lambda _: None),
            )
            for agreed in self._together:
                stack.callback(agreed.close)

    def stop(self) -> str | None:
        """What asks for a stop here, on all processes alike; to look is to be alive."""
        self._phases.moved()
        return self._together[0].due() if self._together else self._stop.requested

    def checkpoint(self) -> bool:
        """Whether to save here, on all processes alike; to be asked at every step."""
        looks = self._is_time_to_look()
        if looks and not self._seen_stop and self._there(STOP):
            self._seen_stop = True
            self._say(f"{STOP}: {'the next one is the last' if self._evaluates else _NEVER}")
        if self._together:
            return bool(self._together[1].due())
        return looks and self._there(CHECKPOINT)

    def saved(self, step: int) -> None:
        """What `checkpoint` asked for is done."""
        self._consume(CHECKPOINT, f"{CHECKPOINT}: step {step} is saved")
        if self._together:
            self._together[1].done()

    def stop_after_evaluation(self) -> bool:
        """Whether the evaluation that was just made is the last, on all processes alike."""
        return bool(processes.of_first(self._there(STOP)))

    def stopped(self, step: int) -> None:
        """What `stop_after_evaluation` asked for is done."""
        self._consume(STOP, f"{STOP}: step {step} is evaluated and saved")

    def _found_by_first(self) -> str | None:
        return CHECKPOINT if processes.is_first() and self._there(CHECKPOINT) else None

    def _there(self, name: str) -> bool:
        return (self._workdir.path / name).exists()

    def _consume(self, name: str, done: str) -> None:
        (self._workdir.path / name).unlink(missing_ok=True)
        self._say(done)

    def _is_time_to_look(self) -> bool:
        if time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + _LOOK_SECONDS
        return True
