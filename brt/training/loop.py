"""The training loop: the order in which a run trains, reports, evaluates, saves and stops.

Hooks are functions that the loop calls before and after each step. A hook is called at every step
and decides itself whether there is something to do at the current step. The argument of a hook is
the session: the run in progress, with its train state, its settings and its open files.
"""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeAlias

from brt.config import Config
from brt.distributed import processes
from brt.errors import Preempted
from brt.formatting import printable
from brt.tasks.arguments import Control
from brt.training import evaluations
from brt.training import workdir as workdirs
from brt.training.bad_steps import BadStep
from brt.training.evaluations import SPLIT
from brt.training.progress import until_first_step, utilization
from brt.training.run import Run
from brt.training.session import Session
from brt.training.workdir import Workdir

Hook: TypeAlias = Callable[[Session], None]


def stop_if_requested(session: Session) -> None:
    """Saves a checkpoint and raises Preempted if a signal or another reason requires it."""
    if session.requests.stop():
        session.save(wait=True)
        raise _preempted(session)


def start_profile(session: Session) -> None:
    session.profile.before(session.completed + 1)


def stop_profile(session: Session) -> None:
    if session.profile.after(session.completed, session.state.step):
        first = session.run.config.training.profile_at[0]
        session.progress.message(f"profile of steps {first} to {session.completed} is written")


def report(session: Session) -> None:
    """Writes the mean metrics of the last steps to metrics.jsonl and shows them to the user.

    This happens every Training.log_every steps and after the last step. The loss of the first step
    is shown, too, but not written.
    """
    step, every = session.completed, session.run.config.training.log_every
    reported = step == session.steps or step % every == 0
    if step == session.first + 1 and step % every:
        session.progress.report_first_step(step, session.accumulator.bits_per_token())
    if not reported:
        return
    session.accumulator.flush()
    metrics, speed = session.accumulator.report(), session.throughput.rate()
    skipped = session.accumulator.skipped
    if skipped or session.run.config.training.on_bad_step != "stop":
        metrics["train/skipped_steps"] = skipped
    session.metrics.write(
        step,
        {
            **metrics,
            "train/learning_rate": float(session.learning_rate(step - skipped)),
            "perf/tokens_per_second": speed.tokens_per_second,
            "perf/step_seconds": speed.step_seconds,
            **utilization(speed.flops_per_second, session.run.mesh),
            "data/epoch": session.run.reader.epoch(step),
        },
    )
    session.progress.report(
        step,
        bits_per_token=metrics["train/bits_per_token"],
        tokens_per_second=speed.tokens_per_second,
        seconds_left=session.throughput.seconds_left(session.steps - step),
    )


def report_start(session: Session) -> None:
    """Says how long this process took until the end of its first step.

    The hook `report`, which comes before this one, has waited for the step.
    """
    if not session.started:
        session.started = True
        session.progress.message(until_first_step(session.phases.seconds()))


def probe(session: Session) -> None:
    """Writes metrics of the recurrent states and gates, every Training.probe_every steps."""
    every = session.run.config.training.probe_every
    if session.probe is None or not session.is_time(every):
        return
    session.accumulator.flush()
    with session.throughput.pause():
        if metrics := session.probe(session.variables.params, session.state.carry):
            session.metrics.write(session.completed, metrics)


def evaluate(session: Session) -> None:
    """Evaluates held-out data and writes the metrics, every Training.evaluate_every steps.

    After the last step, all held-out data are evaluated, even if the earlier evaluations used only
    a part of the data. If a request to stop interrupts the evaluation, nothing of the evaluation is
    written. A resumed run repeats the evaluation at its checkpoint only if metrics.jsonl lacks the
    result.
    """
    if not session.evaluates_now:
        return
    task, dataset, step = session.run.task, session.run.dataset, session.completed
    tag = f"eval/{SPLIT}/{task.primary_metric(dataset).name}"
    if session.resumed and processes.from_first(session.metrics.has(step, tag)):
        return
    session.accumulator.flush()
    evaluator, last = session.evaluator, step >= session.steps
    metrics, summaries = {}, []
    with session.pause("evaluating"):
        for whole in (False, True) if last and evaluator.partial else (last,):
            control = Control(session.requests.stop)
            result = evaluator(session.variables, control, whole=whole)
            if result is None:
                session.cut_short = True
                return
            session.writer.check()  # The run directory may have been moved meanwhile.
            if whole:
                evaluations.write(session.workdir, step, SPLIT, result)
            metrics |= evaluations.scalars(task, evaluator, SPLIT, result.metrics, whole)
            summaries.append("whole: " * (whole and evaluator.partial) + result.summary)
    session.metrics.write(step, metrics)
    session.progress.evaluation(step, f"{SPLIT} {', '.join(summaries)}")


def sample(session: Session) -> None:
    """Generates a text and writes it to samples/<step>.txt, every Training.sample_every steps.

    A resumed run repeats the sample at its checkpoint only if the file is missing.
    """
    if not session.is_time(session.run.config.training.sample_every):
        return
    path = session.workdir.samples / f"{session.completed:08d}.txt"
    if session.resumed and processes.from_first(path.exists()):
        return
    session.accumulator.flush()
    with session.pause("sampling"):
        control = Control(session.requests.stop)
        text = session.evaluator.sample(session.variables, session.completed, control)
    if text is None:
        session.cut_short = True
    else:
        session.writer.check()
        workdirs.write_text(path, printable(text), below=session.workdir.path)


def save(session: Session) -> None:
    every = session.run.config.checkpoint.every
    if session.completed == session.steps or session.is_time(every):
        session.save()


def answer_requests(session: Session) -> None:
    """Fulfils requests that the user made by creating a file in the run directory.

    A file called `checkpoint_now` requests a checkpoint. A file called `stop_after_evaluation`
    requests that the run saves a checkpoint after its next evaluation, and ends by raising
    Preempted.
    """
    step, requests = session.completed, session.requests
    if requests.checkpoint():
        session.save(wait=True)
        requests.checkpoint_done(step)
    evaluated = session.evaluates_now and not session.cut_short
    if evaluated and requests.stop_after_evaluation():
        session.save(wait=True)
        requests.stop_after_evaluation_done(step)
        if step < session.steps:
            raise _preempted(session)


def _preempted(session: Session) -> Preempted:
    return Preempted(f"saved at step {session.completed}; run the same command again to go on")


# The order of the hooks matters. A step is reported, evaluated and sampled from before it is saved,
# so a saved step usually has its evaluation. The exception is a request to stop that interrupts an
# evaluation or a sample: the step is then saved without them, and the run ends. The resumed run
# makes up for them by the hooks WHEN_RESUMED.
WHEN_RESUMED: tuple[Hook, ...] = (evaluate, sample)
BEFORE_STEP: tuple[Hook, ...] = (stop_if_requested, start_profile)
AFTER_STEP: tuple[Hook, ...] = (
    stop_profile, report, report_start, probe, evaluate, sample, save, answer_requests,
)  # fmt: skip
# The loop calls these hooks if the last batches of the run are left out after a rollback.
AFTER_LAST_SKIP: tuple[Hook, ...] = (evaluate, sample, save)


def train(config: Config, path: Path, allowed: Collection[str] = ()) -> tuple[Run, Workdir]:
    """Trains in a run directory until Training.steps, from its newest checkpoint if there is one.

    `allowed` is as in `Session.open`. If the run is asked to stop, it saves everything and raises
    Preempted. Other failures raise other BrtErrors.
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
        # Only these values of the error are kept. The traceback of the error would keep the train
        # state alive, but the restored state needs the memory.
        bad_step, reason = error.step, error.reason
    session.rewind(bad_step, reason)


def _call(hooks: tuple[Hook, ...], session: Session) -> None:
    for hook in hooks:
        hook(session)
