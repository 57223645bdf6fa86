"""The session: a run while it trains, with the operations that the training loop calls.

`open_files` restores or creates a run, and opens all the files that it writes. The order of its
steps matters: files of a killed run are removed before checkpoints are read, processes
compare their configs before they compute anything together, and the files that describe the run are
written only after its data and checkpoint are known to be usable.
"""

import contextlib
import dataclasses
import io
import json
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, PyTree

from brt import runtime, storage, tree_utils
from brt.checkpointing import reader
from brt.checkpointing.reader import VerifiedCheckpoint
from brt.checkpointing.writer import CheckpointWriter, check_disk
from brt.config import Config
from brt.config_io import config_text, saved_json
from brt.data.lanes import BatchIterator
from brt.distributed import mesh as meshes
from brt.distributed import processes
from brt.errors import NonFiniteError, Preempted, closing
from brt.ops import dispatch
from brt.redaction import redacted
from brt.tasks.arguments import EvaluationRequest, Evaluator
from brt.training import data_manifest, maintenance, optimizer, run_summary, saved_model
from brt.training import run as runs
from brt.training import workdir as workdirs
from brt.training.bad_steps import BadStep, BadSteps
from brt.training.evaluations import SPLIT
from brt.training.metrics import MetricsWriter, read_metrics, requested_trackers, start_trackers
from brt.training.preemption import StopSignal
from brt.training.progress import PhaseTracker, Profile, Progress, Throughput
from brt.training.requests import Requests
from brt.training.run import CompiledStep, Run
from brt.training.saved_model import ConfigChanges
from brt.training.state import TrainState, constant_arrays, merged_params
from brt.training.step import MetricAccumulator
from brt.training.watchdog import monitored
from brt.training.workdir import Workdir, describe_process
from brt.types import Variables


@dataclasses.dataclass(kw_only=True, eq=False)
class Session:
    """A run while it trains, with open files: the operations that `brt.training.loop` calls.

    `first` is the number of completed steps when the current series of steps began. A series begins
    when the run is started or resumed, after batches were left out, and after a rewind. The loss of
    the first step of a series is shown to the user.
    """

    run: Run
    workdir: Workdir  # a temporary directory in all processes except for the first
    # The state has either form of `layer_forms`. A training step donates the old state's memory.
    state: TrainState
    completed: int  # number of completed steps, as in `state`
    resumed: bool  # True between the restoring of a checkpoint and the next step
    writer: CheckpointWriter
    metrics: MetricsWriter
    progress: Progress
    phases: PhaseTracker
    requests: Requests
    profile: Profile
    batches: BatchIterator  # the batches of this process
    accumulator: MetricAccumulator  # totals of the metrics since the last report
    bad_steps: BadSteps
    evaluator: Evaluator  # evaluates held-out data, and generates sample texts
    # A function from parameters and carry (caches and recurrent states) to metrics of the recurrent
    # states; None if the task has no such metrics.
    probe: Callable[[PyTree[Array], PyTree[Array]], Mapping[str, float]] | None
    provenance: dict[str, object]  # for provenance.json: versions, machine, command, changes
    throughput: Throughput = dataclasses.field(default_factory=Throughput)
    program: CompiledStep | None = None  # None before `compile`
    started: bool = False  # True after the first step of this process was reported
    cut_short: bool = False  # True if a request to stop interrupted an evaluation or a sample

    def __post_init__(self) -> None:
        config, self.first = self.run.config, self.completed
        self.steps = config.training.steps
        self.learning_rate = jax.jit(optimizer.learning_rate(config.optimizer, self.steps))

    @staticmethod
    @contextlib.contextmanager
    def open(config: Config, path: Path, allowed: Collection[str] = ()) -> Iterator["Session"]:
        """Context that opens a run for training, yields its session, and closes all its files.

        If the directory has checkpoints, the run resumes from the newest one. `allowed` names
        settings that may differ from the checkpoint's config, although they determine the result of
        the run.
        """
        phases = PhaseTracker(began=runtime.began)
        # This call raises an error if a tracking service cannot be used. It comes first, so that
        # the user need not wait for the error until the data are prepared.
        requested_trackers(config, reader.warn_on_stderr)
        storage.of(path).probe()
        saved_model.check_allowed_names(allowed)
        with phases.counting("restoring"):
            checkpoint = saved_model.newest_checkpoint(path)
        with phases.counting("devices"):
            jax.devices()  # The first call connects to the devices, which may take long.
        with phases.counting("data"):
            run = runs.build(config, resumed=checkpoint and (Workdir(path), checkpoint))
        with (
            StopSignal(uninterruptible=lambda: phases.uninterruptible) as stop,
            maintenance.watching(stop.request),
            contextlib.ExitStack() as stack,
        ):
            workdir = enter_workdir(workdirs.create(path), stack)
            watchdog_seconds = run.config.training.watchdog_seconds
            stack.enter_context(monitored(workdir, phases, watchdog_seconds))
            stack.enter_context(meshes.use(run.mesh))
            session = open_files(run, workdir, checkpoint, allowed, stop, phases, stack)
            stack.callback(phases.enter, "ending")
            yield session

    @property
    def variables(self) -> Variables:
        """The model's parameters, with low-rank adapters merged in, and its model state."""
        state = self._stacked_state()
        return Variables(merged_params(self.run.config, state.params), state.model_state)

    def _stacked_state(self) -> TrainState:
        """Converts `state` to the form with stacks of layers (`layer_forms`), and returns it."""
        if self.program:
            self.state = self.program.stacked(self.state)
        return self.state

    def compile(self) -> None:
        """Compiles the train step for the largest batches, and enters the phase "stepping"."""
        with self.pause("compiling"):
            self.program = runs.compiled_step(self.run)
        chosen = ", ".join(f"{op}: {name}" for op, name in dispatch.auto_choices().items())
        self.progress.note(f"implementations chosen by 'auto': {chosen or 'none'}")
        self.phases.enter("stepping", self.completed)

    def step(self) -> None:
        """Trains on the next batch.

        Steps run asynchronously. Only the next call therefore reads the metrics of this step, and
        raises BadStep if it was bad. CheckpointError is raised if a save in the background failed.
        """
        assert self.program, "compile() comes first"
        self.resumed = self.cut_short = False
        batch = next(self.batches)
        if not self.program.prepared(batch):
            self.progress.message("compiling the step for a batch of another shape")
            with self.pause("compiling"):
                self.program.prepare(batch)
        number = self.completed + 1
        limit = self.accumulator.limit(number)
        self.state, metrics = self.program(self.state, runs.put(self.run, batch), limit)
        self.completed = number
        self.accumulator.add(number, metrics)
        self._count(batch)
        self.writer.check()
        self.phases.progressed(number)
        self.progress.step(number)

    def _count(self, batch: Any) -> None:
        run = self.run
        parts = run.config.training.batch_size // len(batch[0])
        flops = run.task.flops(run.config, batch)
        self.throughput.step(parts * run.reader.positions(batch), flops and parts * flops)

    def skip_bad_batches(self) -> bool:
        """After a rollback to this step, leaves out the batches up to the bad one.

        These batches count as completed steps. Returns True if batches were left out.
        """
        ahead = min(self.bad_steps.skip_to(self.completed), self.steps)
        if not ahead:
            return False
        self.progress.message(
            f"steps {self.completed + 1} to {ahead} are left out: bad_batches.jsonl says why"
        )
        self._seek(ahead)
        self.accumulator.skipped += ahead - self.completed
        self.state = self.state._replace(step=runs.put_scalar(self.run, np.int32(ahead)))
        self._begin_series(ahead)
        return True

    def rewind(self, step: int, reason: str) -> None:
        """Returns to the newest checkpoint, or to the beginning, because `step` was bad."""
        del self.state  # The restored train state needs the memory of the present one.
        with self.pause("restoring"):
            self.writer.wait()
            # All processes wait here until process 0 has completed the newest checkpoint.
            processes.wait_for_all("rollback")
            directory = self.workdir.checkpoints
            if not processes.is_first():
                storage.of(directory).refresh()
            checkpoint = saved_model.newest_checkpoint(directory.parent)
            if checkpoint is None:
                self.state, meter = runs.new_state(self.run, lambda line: None), None
            else:
                restored = reader.restore(directory, self.run.state_shapes, checkpoint=checkpoint)
                self.state, meter = restored.state, restored.meta["meter"]
            target = int(self.state.step)
            self.progress.message(self.bad_steps.record(step, reason, target))
            self.accumulator.restore(meter)
            self.metrics.rewind(target)
            self._seek(target)
        self._begin_series(target)

    def _seek(self, step: int) -> None:
        self.batches.set_state({**self.batches.get_state(), "step": step})

    def _begin_series(self, step: int) -> None:
        self.completed = self.first = step
        self.resumed = self.cut_short = False
        self.phases.enter("stepping", step)

    def save(self, *, wait: bool = False) -> None:
        """Starts to save all that a resumed run needs; if `wait` is True, waits for the save's end.

        BadStep is raised if the last step was bad and not skipped. A state that is not finite is
        also a BadStep if Training.on_bad_step is "rollback"; with other policies, NonFiniteError is
        raised for it. CheckpointError is raised if this save or the previous one failed.
        """
        self.accumulator.flush()
        with self.pause("saving"):
            try:
                self.writer.save(self.completed, self._stacked_state(), self._metadata())
            except NonFiniteError as error:
                if not self.bad_steps.rolls_back:
                    raise
                reason = "the update is not finite"
                raise BadStep(self.completed, reason, str(error)) from error
        if wait:
            with self.pause("committing"):
                self.writer.wait()

    def _metadata(self) -> dict[str, object]:
        return {
            "seed": self.run.config.training.seed,
            "data": self.batches.get_state(),
            "meter": self.accumulator.state(),
            "config": saved_json(self.run.config),
            "tokenizer": self.run.dataset.tokenizer.fingerprint,
            "provenance": self.provenance,
            "mesh": meshes.described(self.run.mesh),
        }

    def close(self) -> None:
        """Waits for the last save, and for the other processes of the run.

        Preempted is raised if a request to stop interrupted the evaluation of the last step.
        """
        with self.phases.during("committing"):
            self.writer.wait()
        if self.cut_short:
            step = max(self.completed, self.steps)
            raise Preempted(f"saved at step {step}, not evaluated; run the same command again")
        processes.wait_for_all("end")

    @contextlib.contextmanager
    def pause(self, phase: str) -> Iterator[None]:
        """Context for a phase, such as "saving", whose time is left out of the training speed."""
        with self.phases.during(phase), self.throughput.pause():
            yield

    def is_time(self, every: int) -> bool:
        """Returns True at multiples of `every` (0 for never) and at the last step of the run."""
        at_end = self.completed >= self.steps
        return bool(every) and (at_end or self.completed % every == 0)

    @property
    def evaluates_now(self) -> bool:
        every = self.run.config.training.evaluate_every
        return SPLIT in self.run.dataset.splits and self.is_time(every)


def open_files(
    run: Run,
    workdir: Workdir,
    checkpoint: VerifiedCheckpoint | None,
    allowed: Collection[str],
    stop: StopSignal,
    phases: PhaseTracker,
    stack: contextlib.ExitStack,
) -> Session:
    """Restores or creates a run, opens the files that it writes, and returns its session.

    `workdir` is the result of `enter_workdir`. `checkpoint` is the newest checkpoint that was found
    before the run directory was locked. `allowed` is as in `Session.open`. `stack` closes the files
    at the end of the run.
    """
    config, settings = run.config, run.config.checkpoint
    # The writer is opened first, because it removes the files that a killed run left behind.
    writer = CheckpointWriter(
        workdir.checkpoints, keep=settings.keep, keep_every=settings.keep_every,
        in_background=phases.in_background,
    )  # fmt: skip
    stack.enter_context(writer)
    checkpoint, start = _find_again(workdir, checkpoint), 0
    changes, history = ConfigChanges([], []), []
    if checkpoint:
        start = checkpoint.step
        changes = saved_model.config_changes(checkpoint, config, run.state_shapes, allowed)
        for line in changes.lines:
            reader.warn_on_stderr(f"the config differs from the checkpoint's: {line}")
        before, now = checkpoint.meta.get("mesh"), meshes.described(run.mesh)
        if before and before != now:
            reader.warn_on_stderr(
                f"the checkpoint is of the mesh {meshes.format_mesh(before)}, and this one is "
                f"{meshes.format_mesh(now)}: devices add up numbers in another order, so that "
                "losses are equal only up to rounding"
            )
        history = saved_model.config_history(checkpoint.meta, changes)
    provenance = {**describe_process(), "config_changes": history}
    stream = None if processes.is_first() else io.StringIO()
    progress = stack.enter_context(
        Progress(config.training.steps, initial_step=start, log=workdir.log, stream=stream)
    )
    phases.listen(progress.phase)
    restored = None
    if checkpoint:
        with phases.during("restoring", start):
            restored = reader.restore(
                workdir.checkpoints, run.state_shapes, start, checkpoint=checkpoint
            )
    _check_processes_agree(run, restored.step if restored else None, provenance)
    if restored:
        data_manifest.check_unchanged(workdir, run.dataset.described())
    constant = constant_arrays(config, run.state_shapes)
    writer.freeze(constant, start if restored else None)
    _check_disk(run, workdir, constant)
    batches = BatchIterator(runs.local_reader(run), start)
    stack.callback(batches.close)
    if restored:
        _seek(batches, restored.meta["data"], changes, phases, progress)
        progress.message(f"resuming {workdir.path} from step {start}")
    elif read_metrics(workdir.metrics):
        progress.message(f"{workdir.path} was stopped before its first checkpoint; starting over")
    _write_description(run, workdir, provenance, progress, new=restored is None)
    profile = Profile(config.training.profile_at, workdir)
    stack.enter_context(closing(profile.close))
    services = start_trackers(config, workdir, progress.message) if processes.is_first() else ()
    metrics = MetricsWriter(workdir, start, progress.message, services)
    stack.enter_context(closing(metrics.close))
    bad_steps = BadSteps(config.training, workdir.bad_batches, start, run.reader.described)
    evaluates = SPLIT in run.dataset.splits and bool(config.training.evaluate_every)
    # Without held-out data, the evaluator only generates sample texts.
    split = SPLIT if SPLIT in run.dataset.splits else "train"
    request = EvaluationRequest(config, run.dataset, split, compare_exact=True)
    if restored:
        state = restored.state
    else:
        with phases.counting("initial state"):
            state = runs.new_state(run, progress.message)
    return Session(
        run=run, workdir=workdir, completed=start, resumed=start > 0,
        writer=writer, metrics=metrics, progress=progress, phases=phases, profile=profile,
        batches=batches, bad_steps=bad_steps, provenance=provenance,
        accumulator=MetricAccumulator(
            restored.meta["meter"] if restored else None, spike_factor=config.training.spike_factor,
            on_skip=lambda step, why: progress.message(bad_steps.record(step, why)),
        ),
        requests=Requests(stop, workdir, phases, evaluates, progress.message, stack),
        evaluator=run.task.evaluator(request), probe=run.task.probe(config),
        state=state,
    )  # fmt: skip


def enter_workdir(workdir: Workdir, stack: contextlib.ExitStack) -> Workdir:
    """Locks the run directory for this trainer, and returns the directory to write to.

    With several processes, only the first process locks the run directory and writes to it. Each of
    the other processes writes to a temporary directory. ConfigError is raised if another trainer
    holds the lock, or if the processes do not share the directory.
    """
    if processes.is_first():
        stack.enter_context(workdirs.lock(workdir, reader.warn_on_stderr))
    if processes.several():
        processes.check_shared(workdir.path)
    if processes.is_first():
        return workdir
    own = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="brt-")))
    workdirs.create(own)
    return Workdir(own, workdir.path)


def _find_again(
    workdir: Workdir, checkpoint: VerifiedCheckpoint | None
) -> VerifiedCheckpoint | None:
    """Finds the newest checkpoint again; `checkpoint` was found before the directory was locked."""
    steps = reader.steps(workdir.checkpoints)
    if steps and (checkpoint is None or steps[-1] > checkpoint.step):
        # Either another trainer saved a checkpoint before this process locked the directory, or the
        # newest checkpoint is damaged.
        warned = checkpoint.problems if checkpoint else ()
        return saved_model.newest_checkpoint(workdir.path, warned)
    return checkpoint


def _check_processes_agree(run: Run, step: int | None, provenance: Mapping[str, object]) -> None:
    """Raises ConfigError if the processes of a run differ in config, code, data or checkpoint."""
    versions = {"versions": provenance["versions"], "git": provenance["git"]}
    processes.check_same(
        {
            "config": config_text(run.config),
            "code": json.dumps(versions, indent=1),
            "data": json.dumps(run.reader.identity, indent=1),
            "checkpoint": str(step),
        }
    )


def _check_disk(run: Run, workdir: Workdir, constant: Collection[str]) -> None:
    """Raises CheckpointError if the disk lacks space for two checkpoints.

    If the run keeps only one checkpoint, space for one is enough. Checkpoints share the files of
    `constant` arrays.
    """
    arrays = tree_utils.named(run.state_shapes)
    saves = min(run.config.checkpoint.keep, 2)
    once = tree_utils.required_bytes([arrays[name] for name in constant])
    needed = once + saves * (tree_utils.required_bytes(arrays) - once)
    check_disk(workdir.checkpoints, needed, ", or set Checkpoint.keep = 1" * (saves > 1))


def _seek(
    batches: BatchIterator, saved: Mapping[str, Any], changes: ConfigChanges, phases: PhaseTracker,
    progress: Progress,
) -> None:  # fmt: skip
    """Moves the iterator of batches to the position `saved`, which a checkpoint has stored.

    If the user allowed changes, the values that determine the order of the data, such as the seed,
    are taken from the new config. The step is always taken from the checkpoint.
    """
    new = {k: v for k, v in batches.get_state().items() if k not in ("step", "store")}
    position = {**saved, **(new if changes.allowed else {})}
    if position != saved:
        progress.message("from here on documents are read in another order; some may be read twice")
    with phases.during("seeking"):
        batches.set_state(position)


def _write_description(
    run: Run, workdir: Workdir, provenance: Mapping[str, object], progress: Progress, *, new: bool
) -> None:
    """Writes the files that describe a run, and tells the user what is about to be trained."""
    for line in data_manifest.describe_splits(run.dataset.described()):
        progress.message(line)
    data_manifest.write(workdir, run.dataset, run.weights, new=new)
    workdirs.write_text(workdir.config_gin, redacted(config_text(run.config)))
    workdirs.write_json(workdir.config_json, saved_json(run.config))
    workdirs.write_json(workdir.provenance, provenance)
    for line in (run_summary.describe_start(run, workdir), *run_summary.notes(run)):
        progress.message(line)
    progress.note(run_summary.parameters(run))
