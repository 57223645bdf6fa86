"""Requests to a run that is training: signals, and files that a user creates in its workdir."""

import contextlib
import time
from collections.abc import Callable

from brt import storage
from brt.checkpointing import reader
from brt.distributed import processes
from brt.distributed.processes import AgreedRequest
from brt.training.preemption import StopSignal
from brt.training.progress import PhaseTracker
from brt.training.workdir import Workdir

CHECKPOINT = "checkpoint_now"
STOP = "stop_after_evaluation"
# The run looks for files at most once in this number of seconds, because looking for files is slow
# on network file systems.
_LOOK_SECONDS = 1.0
_NEVER = (
    "this run makes no evaluations (Training.evaluate_every, or no held-out data); stop it with "
    "SIGTERM, which saves as well"
)


class Requests:
    """Requests to a run by signals and files; all processes of the run answer at the same step.

    A user requests a checkpoint, or a stop after the next evaluation, by creating a file in the run
    directory. Only the first process looks for these files, and tells the other processes. The file
    is removed after the request has been fulfilled. If the run is killed before that, it
    fulfils the request when it is started again. Every call of `stop` counts as progress in
    `phases`, because the run calls `stop` regularly while it trains, evaluates or samples.
    `evaluates` is False for a run without evaluations. The threads that wait for requests end when
    `stack` is closed.
    """

    def __init__(
        self,
        stop: StopSignal,
        workdir: Workdir,
        phases: PhaseTracker,
        evaluates: bool,
        say: Callable[[str], None],
        stack: contextlib.ExitStack,
    ):
        self._place, self._phases, self._say = workdir.path, phases, say
        self._evaluates, self._announced_stop = evaluates, False
        self._next_look: dict[str, float] = {}
        self._to_stop = AgreedRequest("stop", lambda: stop.requested, reader.warn_on_stderr)
        self._to_save = AgreedRequest("checkpoint", self._checkpoint_requested, lambda _: None)
        for agreed in (self._to_stop, self._to_save):
            stack.callback(agreed.close)

    def stop(self) -> str | None:
        """Returns why the run must stop now, such as the name of a signal; None if it goes on."""
        self._phases.progressed()
        return self._to_stop.reason_if_due()

    def checkpoint(self) -> bool:
        """Returns True if the user requested a checkpoint; has to be called after every step."""
        if not self._announced_stop and self._appears(STOP):
            self._announced_stop = True
            consequence = "the run stops after the next evaluation" if self._evaluates else _NEVER
            self._say(f"{STOP}: {consequence}")
        return bool(self._to_save.reason_if_due())

    def checkpoint_done(self, step: int) -> None:
        self._fulfil(CHECKPOINT, f"{CHECKPOINT}: step {step} is saved")
        self._to_save.done()

    def stop_after_evaluation(self) -> bool:
        return bool(processes.from_first((self._place / STOP).exists()))

    def stop_after_evaluation_done(self, step: int) -> None:
        self._fulfil(STOP, f"{STOP}: step {step} is evaluated and saved")

    def _checkpoint_requested(self) -> str | None:
        return CHECKPOINT if processes.is_first() and self._appears(CHECKPOINT) else None

    def _appears(self, name: str) -> bool:
        """Returns True if a file exists; False if the last look was less than _LOOK_SECONDS ago."""
        now = time.monotonic()
        if now < self._next_look.get(name, 0.0):
            return False
        self._next_look[name] = now + _LOOK_SECONDS
        return (self._place / name).exists()

    def _fulfil(self, name: str, message: str) -> None:
        (self._place / name).unlink(missing_ok=True)
        storage.of(self._place).removed(self._place / name)
        self._say(message)
