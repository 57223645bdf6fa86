"""Evaluates each checkpoint of a run once, while another process, the trainer, trains the run.

A `Follower` takes no lock and only reads checkpoints. Checkpoints with a report are skipped, so a
follower can be stopped and started again at any time. It ends after the checkpoint of the run's
last step; if the trainer stops earlier, the follower waits until the trainer continues.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from brt import storage, tasks
from brt.checkpointing import reader
from brt.config import Config
from brt.config_io import without_written_paths
from brt.errors import CheckpointError, ConfigError
from brt.tasks.arguments import Evaluator
from brt.training import saved_model
from brt.training import workdir as workdirs
from brt.training.evaluations import Evaluated, can_store, evaluate, open_evaluator, read, scalars
from brt.training.metrics import TensorBoard
from brt.training.workdir import Workdir, check_writable


class Waiter:
    """Sleeps while the caller waits for an event, such as a new checkpoint, until a timeout.

    The caller checks again and again whether the event has happened, and calls `wait` after each
    check. A `timeout_minutes` of 0 is no limit.
    """

    def __init__(self, poll_seconds: float, timeout_minutes: float, say: Callable[[str], object]):
        if not (0 < poll_seconds < math.inf and 0 <= timeout_minutes < math.inf):
            raise ConfigError(
                f"--poll_seconds={poll_seconds:g} must be above 0 and "
                f"--timeout_minutes={timeout_minutes:g} not negative"
            )
        self._poll, self._timeout, self._say = poll_seconds, 60 * timeout_minutes, say
        self._since: float | None = None

    def wait(self, what: str) -> None:
        """Sleeps until the next check; raises CheckpointError at a timeout.

        `what` is the name of the event in messages.
        """
        now = time.monotonic()
        if self._since is None:
            self._since = now
            self._say(f"waiting for {what}")
        if self._timeout and now - self._since >= self._timeout:
            raise CheckpointError(
                f"waited {self._timeout / 60:g} minutes for {what}; check whether the trainer is "
                "still running, and run the same command again"
            )
        time.sleep(self._poll)

    def reset(self) -> None:
        self._since = None


def wait_for_config(path: Path, waiter: Waiter) -> Config:
    """Waits until a trainer has written its config to the run directory, and returns the config."""
    # Settings that name files or directories to write are reset to their defaults, because somebody
    # else may have started the run, and evaluations must not write to places of that person's
    # choice.
    while (config := workdirs.saved_config(path)) is None:
        missing = "" if path.is_dir() else ", which does not exist yet"
        waiter.wait(f"a trainer to start in {path}{missing}")
        storage.of(path).refresh()
    waiter.reset()
    return without_written_paths(config)


class Follower:
    """Evaluates the checkpoints in a run directory as soon as the trainer has written them.

    `config` is the config of the run, with the settings that the user has changed. `ablate` is as
    in `open_evaluator`.
    """

    def __init__(
        self,
        workdir: Workdir,
        config: Config,
        split: str,
        ablate: str | None,
        say: Callable[[str], object],
    ):
        self._workdir, self._config = workdir, config
        self._split, self._ablate, self._say = split, ablate, say
        self._evaluator: Evaluator | None = None  # None until a checkpoint is evaluated
        self._task = tasks.from_config(config)
        self._finished: set[int] = set()
        self._due: set[int] = set()

    def reports(self, waiter: Waiter) -> Iterator[Evaluated]:
        """Evaluates every checkpoint without a report, oldest first, and yields the reports.

        The iteration waits for further checkpoints. It stops after the checkpoint of the last
        training step.
        """
        reports = self._workdir.evaluations.glob(f"*/{self._split}.json")
        done = [int(r.parent.name) for r in reports if r.parent.name.isdecimal()]
        with self._tensorboard(max(done, default=0)) as write:
            while True:
                storage.of(self._workdir.path).refresh()
                # The end of training is checked before a checkpoint is looked for. In the opposite
                # order, the last checkpoint could appear between the two checks and be missed.
                over = self._is_over()
                step = self._next()
                if step is None and over:
                    return
                if step is None:
                    waiter.wait(f"the next checkpoint in {self._workdir.checkpoints}")
                elif evaluated := self._evaluate(step):
                    waiter.reset()
                    report, split = evaluated.report, self._split
                    write(step, scalars(self._task, self._evaluator, split, report, whole=True))
                    yield evaluated
                    storage.of(self._workdir.path).publish()

    @contextlib.contextmanager
    def _tensorboard(self, step: int) -> Iterator[Callable[[int, dict[str, float]], object]]:
        """Context that yields a function which shows the results of a step in TensorBoard.

        `step` is the last step that was evaluated before.
        """
        if not can_store(self._workdir):
            yield lambda step, metrics: None  # The run directory is read-only.
            return
        check_writable(self._workdir.tensorboard, below=self._workdir.path)
        # The results get a directory of their own, which TensorBoard shows as a separate run.
        tensorboard = TensorBoard(self._workdir.tensorboard / "evaluation", step, self._say)
        with contextlib.closing(tensorboard):
            yield tensorboard.write

    def _is_over(self) -> bool:
        steps = reader.steps(self._workdir.checkpoints)
        config = workdirs.saved_config(self._workdir.path) or self._config
        return bool(steps) and steps[-1] >= config.training.steps

    def _next(self) -> int | None:
        """Returns the step of the oldest checkpoint without a report; None if all have reports."""
        # The oldest checkpoint comes first, because the trainer will remove it first.
        existing = set(reader.steps(self._workdir.checkpoints))
        for step in sorted(self._due - existing):
            self._skip(step, f"checkpoint {step} was removed before it could be evaluated")
        self._due = {s for s in existing - self._finished if not self._is_evaluated(s)}
        return min(self._due, default=None)

    def _is_evaluated(self, step: int) -> bool:
        try:
            path = self._workdir.evaluations / str(step) / f"{self._split}.json"
            report = read(path)
        except (OSError, ValueError):
            return False
        ablation = report.get("ablation", {}).get("protocol", {}).get("ablate")
        return self._ablate in (None, ablation)

    def _evaluate(self, step: int) -> Evaluated | None:
        """Evaluates a checkpoint; returns the report, or None if it is damaged or was removed."""
        directory = self._workdir.checkpoints
        try:
            checkpoint = saved_model.find_checkpoint(directory, step)
            model = saved_model.load(self._workdir, checkpoint, self._config)
        except CheckpointError as error:
            removed = step not in reader.present(directory)
            reason = f"checkpoint {step} was removed while it was read" if removed else str(error)
            self._skip(step, reason)
            return None
        self._due.discard(step)
        self._finished.add(step)
        # The data are opened, and the evaluation is compiled, only once.
        if self._evaluator is None:
            self._evaluator = open_evaluator(model, self._split, self._ablate)
        return evaluate(model, self._split, self._ablate, evaluator=self._evaluator)

    def _skip(self, step: int, reason: str) -> None:
        self._finished.add(step)
        self._due.discard(step)
        self._say(f"{reason}; continuing with the next")
