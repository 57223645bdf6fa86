"""The training loop: the order in which a run trains, reports, evaluates, saves and stops."""

from collections.abc import Collection
from pathlib import Path

from brt.config import Config
from brt.training.bad_steps import BadStep
from brt.training.hooks import (
    Hook,
    answer_requests,
    evaluate,
    probe,
    report,
    sample,
    save,
    start_profile,
    stop_if_requested,
    stop_profile,
)
from brt.training.run import Run
from brt.training.session import Session
from brt.training.workdir import Workdir

# The order of the hooks matters. A step is reported, evaluated and sampled from before it is saved,
# so a saved step usually has its evaluation. The exception is a request to stop that interrupts an
# evaluation or a sample: the step is then saved without them, and the run ends. The resumed run
# makes up for them by the hooks WHEN_RESUMED.
WHEN_RESUMED: tuple[Hook, ...] = (evaluate, sample)
BEFORE_STEP: tuple[Hook, ...] = (stop_if_requested, start_profile)
AFTER_STEP: tuple[Hook, ...] = (
    stop_profile, report, probe, evaluate, sample, save, answer_requests,
)  # fmt: skip
# The loop calls these hooks if the run leaves out its last batches after a bad step.
AFTER_LAST_SKIP: tuple[Hook, ...] = (evaluate, sample, save)


def train(config: Config, path: Path, allowed: Collection[str] = ()) -> tuple[Run, Workdir]:
    """Trains in a run directory until Training.steps, from its newest checkpoint if there is one.

    `allowed` is that of `Session.open`. Preempted is raised if the run was asked to stop, and
    everything is saved; other failures are BrtErrors.
    """
    with Session.open(config, path, allowed) as session:
        if session.resumed:
            _call(WHEN_RESUMED, session)
        if session.completed < session.steps:
            session.compile()
        else:
            session.progress.message(
                f"step {session.completed} of {session.steps} is done already; raise "
                "Training.steps to go on"
            )
        while session.completed < session.steps:
            _advance(session)
        session.close()
    return session.run, session.workdir


def _advance(session: Session) -> None:
    """Trains one step with its hooks, or leaves out batches that were recorded as bad.

    If the step is bad and Training.on_bad_step is "rollback", the run returns to its newest
    checkpoint.
    """
    try:
        if session.skip_bad_batches():
            _call(AFTER_LAST_SKIP if session.completed == session.steps else (), session)
            return
        _call(BEFORE_STEP, session)
        session.step()
        _call(AFTER_STEP, session)
        return
    except BadStep as error:
        if not session.bad_steps.rolls_back:
            raise
        # Only these values of the error are kept. The error itself keeps the train state alive,
        # through its traceback, but the restored state needs the memory.
        bad_step, reason = error.step, error.reason
    session.rewind(bad_step, reason)


def _call(hooks: tuple[Hook, ...], session: Session) -> None:
    for hook in hooks:
        hook(session)
