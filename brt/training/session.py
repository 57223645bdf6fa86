"""The session: a run while it trains, with the operations that the training loop calls."""

import contextlib
import dataclasses
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from brt.checkpointing import reader
from brt.config import Config
from brt.config_io import saved_json
from brt.distributed import mesh as meshes
from brt.distributed import processes
from brt.errors import NonFiniteError, Preempted
from brt.ops import dispatch
from brt.training import opening, optimizer, trackers
from brt.training import run as runs
from brt.training import workdir as workdirs
from brt.training.bad_steps import BadStep
from brt.training.evaluations import SPLIT
from brt.training.metrics import Throughput
from brt.training.opening import OpenRun
from brt.training.phases import PhaseTracker
from brt.training.preemption import StopSignal
from brt.training.run import CompiledStep
from brt.training.start import checkpoints, config_changes
from brt.training.state import TrainState, merged_params
from brt.training.watchdog import monitored
from brt.training.workdir import Workdir
from brt.types import Variables


@dataclasses.dataclass(kw_only=True, eq=False)
class Session(OpenRun):
    """A run while it trains: the operations that `brt.training.loop` calls.

    `first` is the number of completed steps when the current series of steps began. A series begins
    when the run is started or resumed, after batches were left out, and after a rewind. The loss of
    the first step of a series is shown to the user.
    """

    throughput: Throughput = dataclasses.field(default_factory=Throughput)
    program: CompiledStep | None = None  # None before `compile`
    cut_short: bool = False  # True if a request to stop interrupted evaluation or sample

    def __post_init__(self) -> None:
        config, self.first = self.run.config, self.completed
        self.steps = config.training.steps
        self.learning_rate = jax.jit(optimizer.learning_rate(config.optimizer, self.steps))

    @classmethod
    @contextlib.contextmanager
    def open(cls, config: Config, path: Path, allowed: Collection[str] = ()) -> Iterator["Session"]:
        """Context that opens a run for training, yields its session, and closes all its files.

        If the directory has checkpoints, the run resumes from the newest one. `allowed` names
        settings that may differ from its config, although a run with another value is a different
        run.
        """
        # This call raises an error if a tracking service cannot be used. It comes first, because
        # preparing the data may take long.
        trackers.requested(config, reader.warn_on_stderr)
        config_changes.check_names(allowed)
        checkpoint = checkpoints.newest(path)
        run = runs.build(config, resumed=checkpoint and (Workdir(path), checkpoint))
        phases = PhaseTracker()
        with (
            StopSignal(uninterruptible=lambda: phases.uninterruptible) as stop,
            contextlib.ExitStack() as stack,
        ):
            workdir = opening.enter_workdir(workdirs.create(path), stack)
            watchdog_seconds = run.config.training.watchdog_seconds
            stack.enter_context(monitored(workdir, phases, watchdog_seconds))
            stack.enter_context(meshes.use(run.mesh))
            parts = opening.open_files(run, workdir, checkpoint, allowed, stop, phases, stack)
            session = cls(**vars(parts))
            # The reference would keep the memory of the first train state in use.
            del parts
            stack.callback(phases.enter, "ending")
            yield session

    @property
    def variables(self) -> Variables:
        """The parameters, with low-rank adapters merged in, and the model state of the model."""
        state = self._stacked_state()
        return Variables(merged_params(self.run.config, state.params), state.model_state)

    def _stacked_state(self) -> TrainState:
        """Returns the train state with stacks of layers (`layer_forms`), which replaces `state`."""
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

        Steps run asynchronously, so the metrics of a step are read, and BadStep is raised for it,
        only in the next call. CheckpointError is raised if a save in the background failed.
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
        """Counts the tokens and FLOPs of a step, summed over the rows of all processes."""
        run = self.run
        parts = run.config.training.batch_size // len(batch[0])
        flops = run.task.flops(run.config, batch)
        self.throughput.step(parts * run.reader.positions(batch), flops and parts * flops)

    def skip_bad_batches(self) -> bool:
        """After a rollback to this step, leaves out the batches up to the bad one.

        They count as completed steps. Returns True if batches were left out.
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
            checkpoint = checkpoints.newest(directory.parent)
            if checkpoint is None:
                self.state, meter = runs.new_state(self.run, lambda line: None), None
            else:
                restored = reader.restore(directory, self.run.state_shapes, checkpoint=checkpoint)
                self.state, meter = restored.state, restored.meta["meter"]
            target = int(self.state.step)
            self.progress.message(self.bad_steps.record_rollback(step, reason, target))
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
        """Starts to save everything that a resumed run needs; `wait` also completes the save.

        If the state is not finite, BadStep or NonFiniteError is raised, as Training.on_bad_step
        says. CheckpointError is raised if this save, or the one before it, failed.
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
