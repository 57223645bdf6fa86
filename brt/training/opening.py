"""Opens a run for training: restores or creates it, and opens all the files that it writes.

The order of the steps matters: files of a killed run are removed before checkpoints are read,
processes compare their configs before they compute anything together, and the files that describe
the run are written only after its data and checkpoint are known to be usable.
"""

import contextlib
import dataclasses
import io
import json
from collections.abc import Callable, Collection, Mapping

from clu import parameter_overview
from jaxtyping import Array, PyTree

from brt import tree_utils
from brt.checkpointing import reader
from brt.checkpointing.reader import Restored, VerifiedCheckpoint
from brt.checkpointing.writer import CheckpointWriter, check_disk
from brt.config_io import config_text, saved_json
from brt.data.lanes import BatchIterator, iterate
from brt.distributed import processes
from brt.errors import closing
from brt.redaction import redacted
from brt.tasks.arguments import EvaluationRequest, Evaluator
from brt.training import run as runs
from brt.training import startup, trackers
from brt.training import workdir as workdirs
from brt.training.accumulator import MetricAccumulator
from brt.training.bad_steps import BadSteps
from brt.training.evaluations import SPLIT
from brt.training.metrics import MetricsWriter, read_metrics
from brt.training.phases import PhaseTracker
from brt.training.preemption import StopSignal
from brt.training.profiling import Profile
from brt.training.progress import Progress
from brt.training.provenance import describe_process
from brt.training.requests import Requests
from brt.training.run import Run
from brt.training.start import checkpoints, config_changes, data_manifest
from brt.training.start.config_changes import ConfigChanges
from brt.training.state import TrainState, constant_arrays
from brt.training.workdir import Workdir


@dataclasses.dataclass(kw_only=True, eq=False)
class OpenRun:
    """A run whose files are open, at the step from which it trains."""

    run: Run
    workdir: Workdir  # a temporary directory in all processes except for the first
    # The state has either form of `layer_forms`. A training step donates its memory to the next.
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
    provenance: dict[str, object]  # versions, machine, command, config changes: provenance.json


def open_files(
    run: Run,
    workdir: Workdir,
    checkpoint: VerifiedCheckpoint | None,
    allowed: Collection[str],
    stop: StopSignal,
    phases: PhaseTracker,
    stack: contextlib.ExitStack,
) -> OpenRun:
    """Restores or creates a run, opens the files that it writes, and returns the opened run.

    Args:
      workdir: the run directory, as `enter_workdir` returned it.
      checkpoint: the checkpoint that was the newest before the workdir was locked; None if there
        was none.
      allowed: names of settings that may differ from the config of the checkpoint; see
        `Session.open`.
      stop: receives SIGTERM and Ctrl-C.
      phases: the tracker to which the function reports the phases "restoring" and "seeking".
      stack: the exit stack that closes the files at the end of the run.
    """
    config = run.config
    settings = config.checkpoint
    # The writer is opened first, because it removes the files that a killed run left behind.
    writer = CheckpointWriter(
        workdir.checkpoints, keep=settings.keep, keep_every=settings.keep_every,
        in_background=phases.in_background,
    )  # fmt: skip
    stack.enter_context(writer)
    provenance = describe_process()
    checkpoint, changes = _find_again(run, workdir, checkpoint, allowed)
    meta, start = (checkpoint.meta, checkpoint.step) if checkpoint else (None, 0)
    provenance["config_changes"] = config_changes.history(meta, changes)
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
    # The disk must have space for two checkpoints, or for one if Checkpoint.keep is 1. Checkpoints
    # share the files of constant arrays.
    saves = min(settings.keep, 2)
    sizes = {
        name: tree_utils.required_bytes(x) for name, x in tree_utils.named(run.state_shapes).items()
    }
    once = sum(sizes[name] for name in constant)
    remedy = ", or set Checkpoint.keep = 1" if saves > 1 else ""
    check_disk(workdir.checkpoints, once + saves * (sum(sizes.values()) - once), remedy)
    batches = _open_batches(run, workdir, restored, changes, phases, progress, stack)
    _write_description(run, workdir, provenance, progress, new=restored is None)
    profile = Profile(config.training.profile_at, workdir)
    stack.enter_context(closing(profile.close))
    services = trackers.start(config, workdir, progress.message) if processes.is_first() else ()
    metrics = MetricsWriter(workdir, start, progress.message, services)
    stack.enter_context(closing(metrics.close))
    bad_steps = BadSteps(config.training, workdir.bad_batches, start, run.reader.described)
    evaluates = SPLIT in run.dataset.splits and bool(config.training.evaluate_every)
    return OpenRun(
        run=run, workdir=workdir, completed=start, resumed=start > 0,
        writer=writer, metrics=metrics, progress=progress, phases=phases, profile=profile,
        batches=batches, bad_steps=bad_steps, provenance=provenance,
        accumulator=MetricAccumulator(
            restored.meta["meter"] if restored else None, spike_factor=config.training.spike_factor,
            on_skip=lambda step, why: progress.message(bad_steps.record_skip(step, why)),
        ),
        requests=Requests(stop, workdir, phases, evaluates, progress.message, stack),
        evaluator=_evaluator(run), probe=run.task.probe(config),
        state=restored.state if restored else runs.new_state(run, progress.message),
    )  # fmt: skip


def enter_workdir(workdir: Workdir, stack: contextlib.ExitStack) -> Workdir:
    """Locks the run directory for this trainer, and returns the directory to write to.

    With several processes, only the first process locks the run directory and writes to it. Each of
    the other processes writes to a temporary directory. The exit stack releases the lock and
    removes the temporary directory.

    Raises:
      ConfigError: another trainer holds the lock, or processes do not share the directory.
    """
    if processes.is_first():
        stack.enter_context(workdirs.lock(workdir, reader.warn_on_stderr))
    if processes.several():
        processes.check_shared(workdir.path)
    return workdir if processes.is_first() else stack.enter_context(workdirs.shadow(workdir))


def _find_again(
    run: Run, workdir: Workdir, checkpoint: VerifiedCheckpoint | None, allowed: Collection[str]
) -> tuple[VerifiedCheckpoint | None, ConfigChanges | None]:
    """Returns the checkpoint to resume from, and the differences between its config and the run's.

    `checkpoint` is the one that was the newest before the workdir was locked; `allowed` as in
    `config_changes.check_resumable`.
    """
    steps = reader.steps(workdir.checkpoints)
    if steps and (checkpoint is None or steps[-1] > checkpoint.step):
        # Either another trainer saved a checkpoint before this process locked the directory, or the
        # newest checkpoint is damaged.
        warned = checkpoint.problems if checkpoint else ()
        checkpoint = checkpoints.newest(workdir.path, warned)
    if checkpoint is None:
        return None, None
    changes = config_changes.compare(checkpoint, run.config, run.state_shapes, allowed)
    for line in changes.lines:
        reader.warn_on_stderr(f"the config differs from the checkpoint's: {line}")
    return checkpoint, changes


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


def _open_batches(
    run: Run,
    workdir: Workdir,
    restored: Restored | None,
    changes: ConfigChanges | None,
    phases: PhaseTracker,
    progress: Progress,
    stack: contextlib.ExitStack,
) -> BatchIterator:
    """Opens the iterator of batches at the position of the checkpoint, and tells the user."""
    start = restored.step if restored else 0
    batches = iterate(runs.local_reader(run), start)
    stack.callback(batches.close)
    if restored:
        saved = restored.meta["data"]
        position = config_changes.resumed_data_position(saved, batches.get_state(), changes)
        if position != saved:
            progress.message(
                "from here on documents are read in another order; some may be read twice"
            )
        with phases.during("seeking"):
            batches.set_state(position)
        progress.message(f"resuming {workdir.path} from step {start}")
    elif read_metrics(workdir.metrics):
        progress.message(f"{workdir.path} was stopped before its first checkpoint; starting over")
    return batches


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
    progress.message(startup.describe(run, workdir))
    for note in (
        startup.idle_devices(run),
        startup.replicated_keys(run),
        startup.describe_rate_factors(run),
    ):
        if note:
            progress.message(note)
    params = run.state_shapes.params
    progress.note(parameter_overview.get_parameter_overview(params, include_stats=False))


def _evaluator(run: Run) -> Evaluator:
    """Returns the evaluator of held-out data; without such data it only draws samples."""
    split = SPLIT if SPLIT in run.dataset.splits else "train"
    return run.task.evaluator(EvaluationRequest(run.config, run.dataset, split, compare_exact=True))
