"""What a run is asked for while it goes on: to stop, by a signal."""

import contextlib
from collections.abc import Callable

from brt.checkpointing import reader
from brt.distributed import processes
from brt.distributed.stopping import AgreedStop
from brt.training.phases import Phases
from brt.training.preemption import StopSignal


def agreed(
    stop: StopSignal, phases: Phases, stack: contextlib.ExitStack
) -> Callable[[], str | None]:
    """What asks this process to stop; of several, where all of them do. To look is to be alive."""
    together = None
    if processes.several():
        together = AgreedStop(lambda: stop.requested, reader.warn_on_stderr)
        stack.callback(together.close)

    def look() -> str | None:
        phases.moved()
        return together.due() if together else stop.requested

    return look
