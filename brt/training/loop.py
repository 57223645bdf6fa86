"""The training loop: step, report, evaluate, sample, save; stop cleanly when asked."""

import contextlib
import io
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import jax
from clu import parameter_overview
from jaxtyping import Array

from brt import tree_utils
from brt.checkpointing import reader
from brt.checkpointing.writer import CheckpointWriter, check_disk
from brt.config import Config
from brt.config_io import config_text, saved_json
from brt.data.lanes import iterate
from brt.distributed import mesh as meshes
from brt.distributed import processes
from brt.errors import NonFiniteError, Preempted, closing
from brt.ops import dispatch
from brt.redaction import redacted
from brt.tasks.protocol import Evaluator
from brt.training import evaluations, kept, optimizer, restoring, resuming, startup, trackers
from brt.training import run as runs
from brt.training import workdir as workdirs
from brt.training.accumulator import MetricAccumulator
from brt.training.bad_steps import BadStep, BadSteps
from brt.training.context import TrainContext
from brt.training.metrics import MetricsWriter, Throughput, read_metrics
from brt.training.phases import Phases
from brt.training.preemption import StopSignal
from brt.training.profiling import Profile, utilization
from brt.training.progress import Progress
from brt.training.requests import Requests
from brt.training.run import Run
from brt.training.state import TrainState
from brt.training.watchdog import attended
from brt.training.workdir import Workdir

SPLIT = "validation"  # that is looked at in training


def train(config: Config, path: Path, allowed: Collection[str] = ()) -> tuple[Run, Workdir]:
    """Trains in a workdir, from its newest checkpoint if it has one, to Training.steps.

    Args:
      allowed: fields, as "Training.seed", that may differ from the checkpoint's although a run
        keeps them.

    Raises:
      Preempted: SIGTERM or Ctrl-C came; everything is saved.
      BrtError: anything else that a person can mend.
    """
    trackers.wanted(config, reader.warn_on_stderr)  # refused before anything is prepared
    resuming.check_names(allowed)
    found = resuming.newest(path)
    run = runs.build(config, saved=found)
    phases = Phases()
    with StopSignal(waits=lambda: phases.waits) as stop, contextlib.ExitStack() as stack:
        workdir = _entered(path, stack)
        watched = attended(workdir, phases, run.config.training.watchdog_seconds)
        stack.enter_context(watched)
        stack.enter_context(meshes.use(run.mesh))
        state, context = _set_up(run, workdir, found, allowed, stop, phases, stack)
        stack.callback(phases.enter, "ending")
        _loop(state, context)
        processes.wait_for_all("end")
    return run, workdir


def _entered(path: Path, stack: contextlib.ExitStack) -> Workdir:
    """The workdir, for this process alone to write; other ones get its shadow."""
    workdir = workdirs.create(path)
    if processes.is_first():
        stack.enter_context(workdirs.lock(workdir, reader.warn_on_stderr))
    if processes.several():
        processes.check_shared(path)
    return workdir if processes.is_first() else stack.enter_context(workdirs.shadow(workdir))


def _check_alike(run: Run, found: int | None, provenance: Mapping[str, object]) -> None:
    """Refuses to begin where processes differ in what makes a run."""
    versions = {"versions": provenance["versions"], "git": provenance["git"]}
    processes.check_same(
        {
            "config": config_text(run.config),
            "code": json.dumps(versions, indent=1),
            "data": json.dumps(run.reader.identity, indent=1),
            "checkpoint": str(found),
        }
    )


def _set_up(
    run: Run,
    workdir: Workdir,
    found: reader.Found | None,
    allowed: Collection[str],
    stop: StopSignal,
    phases: Phases,
    stack: contextlib.ExitStack,
) -> tuple[TrainState, TrainContext]:
    """Restores or starts the run, and opens everything that has to be closed."""
    c = run.config
    writer = stack.enter_context(  # first, for it removes what a killed run left behind
        CheckpointWriter(
            workdir.checkpoints,
            keep=c.checkpoint.keep,
            keep_every=c.checkpoint.keep_every,
            beside=phases.beside,
        )  # fmt: skip
    )
    provenance = workdirs.provenance()
    found, change = restoring.newest(run, workdir, found, allowed)
    provenance["config_changes"] = resuming.history(found and found.meta, change)
    newest = found.step if found else 0
    stream = None if processes.is_first() else io.StringIO()
    progress = stack.enter_context(
        Progress(c.training.steps, initial_step=newest, log=workdir.log, stream=stream)
    )
    phases.listen(progress.phase)
    saved = None
    if found:
        with phases.during("restoring", newest):
            saved = reader.restore(workdir.checkpoints, run.abstract, newest, found=found)
    _check_alike(run, saved.step if saved else None, provenance)
    if saved:
        kept.check_unchanged(workdir, run.dataset.described())
    start = saved.step if saved else 0
    needed = tree_utils.required_bytes(run.abstract) * min(c.checkpoint.keep, 2)
    check_disk(workdir.checkpoints, needed)
    batches = iterate(runs.own_reader(run), start)
    stack.callback(batches.close)
    if saved:
        place = resuming.position(saved.meta["data"], batches.get_state(), change)
        if place != saved.meta["data"]:
            progress.message("documents come in another order from here: some may come twice")
        with phases.during("seeking"):
            batches.set_state(place)
        progress.message(f"resuming {workdir.path} from step {start}")
    elif read_metrics(workdir.metrics):
        progress.message(f"{workdir.path} was stopped before its first checkpoint; beginning again")
    for line in kept.lines(run.dataset.described()):
        progress.message(line)
    kept.keep(workdir, run.dataset)
    workdirs.write_text(workdir.config_gin, redacted(config_text(c)))
    workdirs.write_json(workdir.config_json, saved_json(c))
    workdirs.write_json(workdir.provenance, provenance)
    progress.message(startup.line(run, workdir))
    if idle := startup.idle_devices(run):
        progress.message(idle)
    overview = parameter_overview.get_parameter_overview(run.abstract.params, include_stats=False)
    progress.note(overview)
    profile = Profile(c.training.profile_at, workdir)
    stack.enter_context(closing(profile.close))
    told = trackers.started(c, workdir, progress.message) if processes.is_first() else ()
    metrics = MetricsWriter(workdir, start, progress.message, told)
    stack.enter_context(closing(metrics.close))
    bad = BadSteps(c.training, workdir.bad_batches, start, run.reader.described)
    accumulator = MetricAccumulator(
        saved.meta["meter"] if saved else None, spike_factor=c.training.spike_factor,
        skipped=lambda step, reason: progress.message(bad.skipped(step, reason)),
    )  # fmt: skip
    context = TrainContext(
        run, workdir, writer, metrics, progress, Throughput(), phases,
        Requests(stop, workdir, phases, _evaluates(run), progress.message, stack), profile, batches,
        accumulator, bad, _evaluator(run), run.task.probe(c), provenance,
    )  # fmt: skip
    return saved.state if saved else runs.new_state(run, progress.message), context


def _held_out(run: Run) -> str | None:
    return SPLIT if SPLIT in run.dataset.splits else None


def _evaluates(run: Run, step: int | None = None) -> bool:
    """Whether held-out data are read at a step; None: at any."""
    every, steps = run.config.training.evaluate_every, run.config.training.steps
    return bool(_held_out(run)) and _is_time(steps if step is None else step, every, steps)


def _evaluator(run: Run) -> Evaluator:
    """Of held-out data; without any, of the training data, for samples."""
    return run.task.evaluator(run.config, run.dataset, _held_out(run) or "train", beside=True)


def _loop(state: TrainState, context: TrainContext) -> None:
    """Steps until the end or until asked to stop."""
    progress, steps = context.progress, context.run.config.training.steps
    first = int(state.step)
    complete = not first or _look(first, state, context, resumed=True)
    if first < steps:
        complete = _to_the_end(first, state, context)
    else:
        progress.message(f"step {first} of {steps} is done already; raise Training.steps to go on")
    with context.phases.during("committing"):
        context.writer.wait()
    if not complete:
        raise Preempted(f"saved at step {max(first, steps)}, not evaluated; run the same again")


def _to_the_end(first: int, state: TrainState, context: TrainContext) -> bool:
    """Trains, if need be again; False where the look at the last step was cut short."""
    with _phase("compiling", context):
        program = runs.compiled_step(context.run)
    chosen = ", ".join(f"{op}: {name}" for op, name in dispatch.chosen().items())
    context.progress.note(f"implementations chosen by 'auto': {chosen or 'none'}")
    while True:
        try:
            return _steps(first, state, program, context)
        except BadStep as error:
            if not context.bad.goes_back:
                raise
            bad = error.with_traceback(None)  # which would keep the state of that step
        with _phase("restoring", context):
            state = restoring.go_back(bad, context)
        first = int(state.step)


def _steps(
    first: int, state: TrainState, program: runs.CompiledStep, context: TrainContext
) -> bool:
    """Trains from step `first` to the last; False where the look at that was cut short."""
    run = context.run
    t, every = run.config.training, run.config.checkpoint.every
    if first == t.steps:  # all that was left was left out
        complete = _look(first, state, context)
        _save(state, context)
    rate = jax.jit(optimizer.learning_rate(run.config.optimizer, t.steps))
    context.phases.enter("stepping", first)
    for step in range(first, t.steps):
        if context.bad.skip_batches(step):
            state, step = restoring.skip_batches(step, state, context)
            return _steps(step, state, program, context)
        if context.requests.stop():
            _save(state, context, wait=True)
            raise Preempted(f"saved at step {step}; run the same command again to go on")
        batch = next(context.batches)
        if not program.prepared(batch):
            context.progress.message("a batch of another length")
            with _phase("compiling", context):
                program.prepare(batch)
        done = step + 1
        context.profile.before(done)
        state, metrics = program(state, runs.put(run, batch), context.accumulator.limit(done))
        if context.profile.after(done, metrics):
            context.progress.message(f"profile of steps {t.profile_at[0]} to {done} is written")
        context.accumulator.add(done, metrics)
        share = t.batch_size // len(batch[0])  # of this process's devices
        flops = run.task.flops(run.config, batch)
        context.throughput.step(share * run.reader.positions(batch), flops and share * flops)
        context.writer.check()
        context.phases.moved(done)
        context.progress.step(done)
        if step == first and done % t.log_every:
            context.progress.began(done, context.accumulator.bits_per_token())
        last = done == t.steps
        if last or done % t.log_every == 0:
            _report(done, rate, context)
        if _is_time(done, t.probe_every, t.steps):
            _probe(done, state, context)
        complete = _look(done, state, context)
        if last or (every and done % every == 0):
            _save(state, context)
        if context.requests.checkpoint():
            _save(state, context, wait=True)
            context.requests.saved(done)
        if complete and _evaluates(run, done) and context.requests.stop_after_evaluation():
            _save(state, context, wait=True)
            context.requests.stopped(done)
            if not last:
                raise Preempted(f"saved at step {done}; run the same command again to go on")
    return complete


def _report(step: int, rate: Callable[[int], Array], context: TrainContext) -> None:
    """Adds an interval to metrics.jsonl and the progress bar."""
    context.accumulator.flush()
    values, speed, skipped = (
        context.accumulator.report(),
        context.throughput.rate(),
        context.accumulator.skipped,
    )
    if skipped or context.run.config.training.on_bad_step != "stop":
        values["train/skipped_steps"] = skipped
    context.metrics.write(
        step,
        {
            **values,
            "train/learning_rate": float(rate(step - skipped)),
            "perf/tokens_per_second": speed.tokens_per_second,
            "perf/step_seconds": speed.step_seconds,
            **utilization(speed.flops_per_second, context.run.mesh),
            "data/epoch": context.run.reader.epoch(step),
        },
    )
    context.progress.report(
        step,
        bits_per_token=values["train/bits_per_token"],
        tokens_per_second=speed.tokens_per_second,
        seconds_left=context.throughput.seconds_left(context.run.config.training.steps - step),
    )


def _probe(step: int, state: TrainState, context: TrainContext) -> None:
    """Adds figures of the recurrent states and gates to metrics.jsonl."""
    if context.probe is None:
        return
    context.accumulator.flush()
    with context.throughput.pause():
        if values := context.probe(state.params, state.carry):
            context.metrics.write(step, values)


def _look(step: int, state: TrainState, context: TrainContext, *, resumed: bool = False) -> bool:
    """Evaluates and samples where it is time to; False where a stop cut that short.

    Args:
      resumed: do only what an earlier stop cut short.
    """
    run, metrics, t = context.run, context.metrics, context.run.config.training
    sample = context.workdir.samples / f"{step:08d}.txt"
    name = run.task.primary_metric(run.dataset).name if resumed else ""
    evaluated = resumed and processes.of_first(metrics.has(step, f"eval/{SPLIT}/{name}"))
    sampled = resumed and processes.of_first(sample.exists())
    complete = True
    if _evaluates(context.run, step) and not evaluated:
        complete = _evaluate(step, state, context)
    if _is_time(step, t.sample_every, t.steps) and not sampled:
        complete = _sample(step, state, sample, context) and complete
    return complete


@contextlib.contextmanager
def _phase(name: str, context: TrainContext) -> Iterator[None]:
    """What is no training, and does not count for its speed."""
    with context.phases.during(name), context.throughput.pause():
        yield


def _is_time(step: int, every: int, steps: int) -> bool:
    return bool(every) and (step >= steps or step % every == 0)


def _evaluate(step: int, state: TrainState, context: TrainContext) -> bool:
    """Reads held-out data as always, at the last step also the whole; False where a stop cut that
    short."""
    context.accumulator.flush()
    last, read, found = step >= context.run.config.training.steps, context.evaluator, {}
    headlines = []
    with _phase("evaluating", context):
        for whole in (False, True) if last and read.partial else (last,):
            reading = read(
                state.params, model_state=state.model_state, whole=whole,
                stop=context.requests.stop,
            )  # fmt: skip
            if reading is None:
                return False
            if whole:
                evaluations.write(context.workdir, step, SPLIT, reading)
            found |= evaluations.scalars(context.run.task, read, SPLIT, reading.figures, whole)
            headlines.append("whole: " * (whole and read.partial) + reading.summary)
    context.metrics.write(step, found)
    context.progress.evaluation(step, f"{SPLIT} {', '.join(headlines)}")
    return True


def _sample(step: int, state: TrainState, path: Path, context: TrainContext) -> bool:
    """Writes a text that the model draws."""
    context.accumulator.flush()
    with _phase("sampling", context):
        text = context.evaluator.sample(
            state.params, step, context.requests.stop, model_state=state.model_state
        )
    if text is not None:
        workdirs.write_text(path, text, below=context.workdir.path)
    return text is not None


def _save(state: TrainState, context: TrainContext, *, wait: bool = False) -> None:
    """Starts a checkpoint of everything that a resumed run needs, or waits until it is there."""
    context.accumulator.flush()
    with _phase("saving", context):
        try:
            context.writer.save(int(state.step), state, context.saved_metadata())
        except NonFiniteError as error:
            if not context.bad.goes_back:
                raise
            raise BadStep(int(state.step), "its update is not finite", str(error)) from error
    if wait:
        with _phase("committing", context):
            context.writer.wait()
