"""Requests to a run that is training: signals, and files that a user creates in its workdir."""

import contextlib
import time
from collections.abc import Callable

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
    is removed after the request has been fulfilled. If the run is killed before, it fulfils the
    request when it is started again. Every call of `stop` counts as progress in `phases`, because
    the run calls `stop` regularly while it trains, evaluates or samples.
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
        self._stop, self._workdir, self._phases, self._say = stop, workdir, phases, say
        self._evaluates = evaluates
        self._next_look, self._announced_stop = 0.0, False
        # With several processes, this is a pair of requests on whose step all processes agree: to
        # stop, and to save a checkpoint. With one process it is None.
        self._agreed: tuple[AgreedRequest, AgreedRequest] | None = None
        if processes.several():
            self._agreed = (
                AgreedRequest("stop", lambda: stop.requested, reader.warn_on_stderr),
                AgreedRequest("checkpoint", self._checkpoint_of_first, lambda _: None),
            )
            for agreed in self._agreed:
                stack.callback(agreed.close)

    def stop(self) -> str | None:
        """Returns the name of the signal that asks the run to stop now; None without a signal."""
        self._phases.progressed()
        return self._agreed[0].reason_if_due() if self._agreed else self._stop.requested

    def checkpoint(self) -> bool:
        """Returns True if the user requested a checkpoint; has to be called after every step."""
        looks = time.monotonic() >= self._next_look
        if looks:
            self._next_look = time.monotonic() + _LOOK_SECONDS
        if looks and not self._announced_stop and self._exists(STOP):
            self._announced_stop = True
            consequence = "the run stops after the next evaluation" if self._evaluates else _NEVER
            self._say(f"{STOP}: {consequence}")
        if self._agreed:
            return bool(self._agreed[1].reason_if_due())
        return looks and self._exists(CHECKPOINT)

    def checkpoint_done(self, step: int) -> None:
        self._fulfil(CHECKPOINT, f"{CHECKPOINT}: step {step} is saved")
        if self._agreed:
            self._agreed[1].done()

    def stop_after_evaluation(self) -> bool:
        return bool(processes.from_first(self._exists(STOP)))

    def stop_after_evaluation_done(self, step: int) -> None:
        self._fulfil(STOP, f"{STOP}: step {step} is evaluated and saved")

    def _checkpoint_of_first(self) -> str | None:
        return CHECKPOINT if processes.is_first() and self._exists(CHECKPOINT) else None

    def _exists(self, name: str) -> bool:
        return (self._workdir.path / name).exists()

    def _fulfil(self, name: str, message: str) -> None:
        (self._workdir.path / name).unlink(missing_ok=True)
        self._say(message)
