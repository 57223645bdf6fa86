"""What a run goes on with: its newest checkpoint, once more, or behind what is left out."""

from collections.abc import Collection

import numpy as np

from brt.checkpointing import reader
from brt.distributed import processes
from brt.training import resuming
from brt.training import run as runs
from brt.training.bad_steps import BadStep
from brt.training.context import TrainContext
from brt.training.run import Run
from brt.training.state import TrainState
from brt.training.workdir import Workdir


def newest(
    run: Run, workdir: Workdir, found: reader.Found | None, allowed: Collection[str]
) -> tuple[reader.Found | None, resuming.Change | None]:
    """The newest whole checkpoint, if it is one of this run, and what has changed since."""
    steps = reader.steps(workdir.checkpoints)
    if steps and (found is None or steps[-1] > found.step):
        # Another trainer went on before we had the lock, or the newest is damaged.
        found = resuming.newest(workdir.path, told=found.problems if found else ())
    if found is None:
        return None, None
    change = resuming.change(found, run.config, run.abstract, allowed)
    for line in change.lines:
        reader.warn_on_stderr(f"the checkpoint has another {line}")
    return found, change


def go_back(bad: BadStep, context: TrainContext) -> TrainState:
    """What the newest checkpoint holds, or what the run began with; what came later is forgotten.

    Raises:
      NonFiniteError: it was done too often.
      CheckpointError: no checkpoint is whole.
    """
    context.writer.wait()
    processes.wait_for_all("rollback")  # process 0 gives a checkpoint its name
    found = resuming.newest(context.workdir.checkpoints.parent)
    if found is None:
        state, accumulator = runs.new_state(context.run, lambda line: None), None
    else:
        restored = reader.restore(context.workdir.checkpoints, context.run.abstract, found=found)
        state, accumulator = restored.state, restored.meta["meter"]
    step = int(state.step)
    context.progress.message(context.bad.left_out(bad, step))
    context.accumulator.go_back(accumulator)
    context.metrics.go_back(step)
    context.batches.set_state({**context.batches.get_state(), "step": step})
    return state


def skip_batches(step: int, state: TrainState, context: TrainContext) -> tuple[TrainState, int]:
    """The same state behind the batches that are left out, and the step at which that is."""
    ahead = min(context.bad.skip_batches(step), context.run.config.training.steps)
    context.progress.message(
        f"steps {step + 1} to {ahead} are left out: bad_batches.jsonl says why"
    )
    context.batches.set_state({**context.batches.get_state(), "step": ahead})
    context.accumulator.skipped += ahead - step
    return state._replace(step=runs.put_scalar(context.run, np.int32(ahead))), ahead
