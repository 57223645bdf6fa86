"""Detects and records bad steps: loss or gradients that are not finite, or a loss that jumps.

Training.on_bad_step says what the run does after a bad step:

    stop      the run ends, and nothing of the step is saved
    skip      the step leaves the train state unchanged; the compiled step itself decides this
    rollback  the run returns to its newest checkpoint and continues after the bad batch; the
              batches between the checkpoint and the bad batch are not read again (Chowdhery et al.
              2022, section 5.1)

A skipped batch still counts as a step, so that a step of a given number always reads the same
batch. The learning rate counts only updates. bad_batches.jsonl records for every bad step what was
wrong and which documents its batch consisted of. The file contains no times, so a run that is
killed and started again ends with the same file.
"""

import json
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from brt import durable, untrusted
from brt.config import Training
from brt.distributed import processes
from brt.errors import CheckpointError, NonFiniteError
from brt.training.workdir import explain_lost_record

# A loss is compared with the median loss of this number of recent steps.
RECENT = 64
# Until the losses of this number of steps are known, no loss counts as a jump.
FEWEST = 16
_RECORD = {"step": int, "policy": str, "from?": int, "reason": str, "batch": list}


class BadStep(NonFiniteError):
    """An error which says that the update of a training step must not be used."""

    # Steps are counted from 1. `reason` is a phrase about what is wrong, and `remedy` is a phrase
    # about what the user can do.
    def __init__(self, step: int, reason: str, remedy: str):
        super().__init__(f"step {step}: {reason}; {remedy}")
        self.step, self.reason = step, reason


class RecentLosses:
    """Losses of recent steps, and the limit above which the loss of the next step is a jump.

    The limit is `factor` (Training.spike_factor) times the median loss; there is no limit if the
    factor is 0. When step n starts, step n - 1 may still be running. The limit for step n therefore
    uses only losses up to step n - 2, so that it does not depend on whether step n - 1 has ended.
    """

    def __init__(self, factor: float, saved: Iterable[Sequence[int | float]] = ()):
        self._factor = factor
        self._losses = deque(((int(s), float(x)) for s, x in saved), maxlen=RECENT + 1)

    def add(self, step: int, loss: float) -> None:
        if self._factor:
            self._losses.append((step, loss))

    def limit(self, step: int) -> float:
        """Returns the loss, in nats per token, above which the loss of a step is a jump.

        It uses the losses before step - 1, and is infinite while fewer than FEWEST of them exist.
        """
        known = [loss for other, loss in self._losses if other < step - 1][-RECENT:]
        if len(known) < FEWEST:
            return math.inf
        return float(np.float32(self._factor * statistics.median(known)))

    def state(self) -> list[tuple[int, float]]:
        return list(self._losses)


class BadSteps:
    """The bad steps of a run, which process 0 records in the file bad_batches.jsonl.

    `start` is the step from which the run starts. Records of skipped steps after `start` are
    deleted, because the run reaches these steps again. `describe` is a function from the index of a
    batch (0 for step 1) to a description of the batch's documents as JSON.
    """

    def __init__(
        self, training: Training, file: Path, start: int,
        describe: Callable[[int], list[dict[str, Any]]],
    ):  # fmt: skip
        self._training, self._file, self._describe = training, file, describe
        self._records = read(file)
        self._drop_skips_after(start)

    @property
    def rolls_back(self) -> bool:
        return self._training.on_bad_step == "rollback"

    def skip_to(self, step: int) -> int:
        """Returns the last step whose batch is left out after a rollback to `step`; 0 for none."""
        return max((r["step"] for r in self._records if r.get("from") == step), default=0)

    def record(self, step: int, reason: str, checkpoint: int | None = None) -> str:
        """Records a bad step; returns a message for the user.

        `checkpoint` is the step to which the run returns; None if the bad step was skipped.
        NonFiniteError is raised if the run has more bad steps than Training.max_bad_steps.
        """
        start, consequence = {}, "the step changed nothing"
        if checkpoint is not None:
            self._drop_skips_after(checkpoint)
            start = {"from": checkpoint}
            consequence = f"continuing after it from the state of step {checkpoint}"
        limit = self._training.max_bad_steps
        if len(self._records) >= limit:
            raise NonFiniteError(
                f"step {step}: {reason}; Training.max_bad_steps = {limit} allows no more bad steps "
                f"(see {self._file.name}): lower Optimizer.learning_rate, inspect the documents, "
                "or raise Training.max_bad_steps; then run again to go on from the newest "
                "checkpoint; or set Optimizer.clip_norm in a new run"
            )
        content = {"reason": reason, "batch": self._describe(step - 1)}
        policy = self._training.on_bad_step
        self._records.append({"step": step, "policy": policy, **start, **content})
        self._write()
        count = f"{len(self._records)} of at most {limit} such steps"
        return f"step {step}: {reason}; {consequence} ({count})"

    def _drop_skips_after(self, step: int) -> None:
        """Forgets skipped steps that the run reaches again; records of rollbacks stay."""
        remaining = [r for r in self._records if "from" in r or r["step"] <= step]
        if remaining != self._records:
            self._records = remaining
            self._write()

    def _write(self) -> None:
        if processes.is_first():
            text = "".join(json.dumps(r, allow_nan=False) + "\n" for r in self._records)
            with explain_lost_record(self._file):
                durable.write(self._file, text.encode())


def read(file: Path) -> list[dict[str, Any]]:
    """Returns the records of a file bad_batches.jsonl, one for each bad step; [] without the file.

    A record has the entries "step", "policy" (Training.on_bad_step), "reason" and "batch" and,
    after a rollback, "from", the step of the checkpoint to which the run returned.
    """
    records = []
    try:
        for line in filter(None, untrusted.read_file(file).split(b"\n")):
            record = untrusted.checked_json(line, _RECORD)
            if not 0 <= record.get("from", 0) < record["step"]:
                raise ValueError(f"step {record['step']} is behind no step {record.get('from')}")
            records.append(record)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{file} is damaged ({error}), and says what this run left out; restore it, or delete "
            "it to read all batches again"
        ) from error
    return records
