"""Evaluates the checkpoints of a run while it is being trained, each once.

A follower takes no lock and only reads checkpoints. Those whose report exists are done, so
it may be stopped and started again at any time. It ends when the checkpoint of the run's
last step is evaluated; a trainer that stopped earlier may go on, and is waited for.
"""

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from brt import tasks
from brt.checkpointing import reader
from brt.config import Config
from brt.config_io import to_read_with
from brt.errors import CheckpointError, ConfigError
from brt.evaluation import job
from brt.training import evaluations
from brt.training import workdir as workdirs
from brt.training.evaluations import Evaluated
from brt.training.metrics import TensorBoard
from brt.training.start import checkpoints, saved_model
from brt.training.workdir import Workdir

Say = Callable[[str], object]


class Patience:
    """Waits between two looks, and not for ever.

    Args:
      poll_seconds: from look to look.
      timeout_minutes: of waiting for one thing; 0: no limit.
      say: told once what is waited for.

    Raises:
      ConfigError: times that are none.
    """

    def __init__(self, poll_seconds: float, timeout_minutes: float, say: Say):
        if not (0 < poll_seconds < math.inf and 0 <= timeout_minutes < math.inf):
            raise ConfigError(
                f"--poll_seconds={poll_seconds:g} must be above 0 and "
                f"--timeout_minutes={timeout_minutes:g} not negative"
            )
        self._poll, self._timeout, self._say = poll_seconds, 60 * timeout_minutes, say
        self._since: float | None = None

    def wait(self, what: str) -> None:
        """Sleeps; CheckpointError where this has taken too long."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
            self._say(f"waiting for {what}")
        if self._timeout and now - self._since >= self._timeout:
            raise CheckpointError(
                f"waited {self._timeout / 60:g} minutes for {what}; look whether the trainer is "
                "still at work, and run the same command again"
            )
        time.sleep(self._poll)

    def rewarded(self) -> None:
        """What was waited for has come."""
        self._since = None


def wait_for_config(path: Path, patience: Patience) -> Config:
    """The config to read a run in a workdir with, as soon as its trainer has written it."""
    while (config := workdirs.saved_config(path)) is None:
        there = "" if path.is_dir() else ", which does not exist yet"
        patience.wait(f"a trainer to start in {path}{there}")
    patience.rewarded()
    return to_read_with(config)


class Follower:
    """Reads the checkpoints of a workdir as they come.

    Args:
      config: of the run, changed where that makes sense.
      ablate: what to take away in a second reading.
      say: told about every checkpoint that is passed over.
    """

    def __init__(self, workdir: Workdir, config: Config, split: str, ablate: str | None, say: Say):
        self._workdir, self._config = workdir, config
        self._split, self._ablate, self._say = split, ablate, say
        self._read = job.SplitReader(config, split, ablate)
        self._task = tasks.from_config(config)
        self._passed: set[int] = set()
        self._due: set[int] = set()

    def reports(self, patience: Patience) -> Iterator[Evaluated]:
        """The report of every checkpoint, the oldest first, until training has ended."""
        reports = self._workdir.evaluations.glob(f"*/{self._split}.json")
        done = [int(r.parent.name) for r in reports if r.parent.name.isdecimal()]
        workdirs.refuse_links(self._workdir)
        directory = self._workdir.tensorboard / "evaluation"  # a run of its own beside training
        tensorboard = TensorBoard(directory, max(done, default=0), self._say)
        try:
            while True:
                over = self._is_over()  # asked first: what is found afterwards is all there is
                step = self._next()
                if step is None and over:
                    return
                if step is None:
                    patience.wait(f"the next checkpoint in {self._workdir.checkpoints}")
                elif found := self._evaluate(step):
                    patience.rewarded()
                    tensorboard.write(step, self._scalars(found.report))
                    yield found
        finally:
            tensorboard.close()

    def _is_over(self) -> bool:
        """Whether the checkpoint of the last step is there; config.json is the trainer's."""
        steps = reader.steps(self._workdir.checkpoints)
        config = workdirs.saved_config(self._workdir.path) or self._config
        return bool(steps) and steps[-1] >= config.training.steps

    def _next(self) -> int | None:
        """The oldest checkpoint that is left to evaluate: the trainer removes it first."""
        there = set(reader.steps(self._workdir.checkpoints))
        for step in sorted(self._due - there):
            self._pass(step, f"checkpoint {step} was removed before its turn came")
        self._due = {s for s in there - self._passed if not self._is_evaluated(s)}
        return min(self._due, default=None)

    def _is_evaluated(self, step: int) -> bool:
        try:
            path = self._workdir.evaluations / str(step) / f"{self._split}.json"
            report = evaluations.read(path)
        except (OSError, ValueError):
            return False
        ablation = report.get("ablation", {}).get("protocol", {}).get("ablate")
        return self._ablate in (None, ablation)

    def _evaluate(self, step: int) -> Evaluated | None:
        """The report, or None where the checkpoint is damaged or was removed meanwhile."""
        directory = self._workdir.checkpoints
        try:
            found = checkpoints.find(directory, step)
            model = saved_model.load(self._workdir, found, self._config)
        except CheckpointError as error:
            removed = step not in reader.present(directory)
            reason = f"checkpoint {step} was removed while it was read" if removed else str(error)
            self._pass(step, reason)
            return None
        self._due.discard(step)
        return self._read(model)

    def _pass(self, step: int, reason: str) -> None:
        self._passed.add(step)
        self._due.discard(step)
        self._say(f"{reason}; going on with the next")

    def _scalars(self, report: dict[str, Any]) -> dict[str, float]:
        return evaluations.scalars(
            self._task, self._read.evaluator, self._split, report, whole=True
        )
