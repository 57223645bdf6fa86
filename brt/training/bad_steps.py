"""Steps whose loss or gradients are not finite, or whose loss jumps; bad_batches.jsonl.

    stop      the run ends, and nothing of the step is saved
    skip      the step changes nothing: decided where it is computed, in the step itself
    rollback  the run goes back to its newest checkpoint, and on behind the batch: those between are
              not read again (Chowdhery et al. 2022, section 5.1)

Steps are counted as if nothing had been, so that a step always reads the same batch; learning
rates follow the updates. bad_batches.jsonl says of each what was wrong, and what its batch was made
of. It has no clock in it: a run that is killed, and started again, ends with the same file.
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

RECENT = 64  # steps whose median is the usual loss
FEWEST = 16  # of them that make one
_RECORD = {"step": int, "policy": str, "from?": int, "reason": str, "batch": list}


class BadStep(NonFiniteError):
    """A step that must not count.

    Attributes:
      step: its number, from 1.
      reason: what is wrong with it.
    """

    def __init__(self, step: int, reason: str, remedy: str):
        super().__init__(f"step {step}: {reason}; {remedy}")
        self.step, self.reason = step, reason


class Usual:
    """Losses of recent steps, and the one above which another is bad.

    When a step begins, the one before is still computed: the limit of a step knows the losses up to
    the last but one, whether they were waited for or not.

    Args:
      factor: Training.spike_factor.
      saved: what `state` gave.
    """

    def __init__(self, factor: float, saved: Iterable[Sequence[int | float]] = ()):
        self._factor = factor
        self._losses = deque(((int(s), float(x)) for s, x in saved), maxlen=RECENT + 1)

    def add(self, step: int, loss: float) -> None:
        """Of a step that counts."""
        if self._factor:
            self._losses.append((step, loss))

    def limit(self, step: int) -> float:
        """Of the loss of a step; infinity where nothing is usual yet."""
        known = [loss for other, loss in self._losses if other < step - 1][-RECENT:]
        if len(known) < FEWEST:
            return math.inf
        return float(np.float32(self._factor * statistics.median(known)))

    def state(self) -> list[tuple[int, float]]:
        """JSON."""
        return list(self._losses)


class BadSteps:
    """What bad steps there were, and what becomes of the next.

    Args:
      training: what the run is to do about them.
      file: bad_batches.jsonl, which process 0 writes.
      start: the step that the run begins at; what was skipped beyond comes again.
      describe: what the batch of a step (from 0) is made of.

    Raises:
      CheckpointError: the file is damaged.
    """

    def __init__(
        self, training: Training, file: Path, start: int,
        describe: Callable[[int], list[dict[str, Any]]],
    ):  # fmt: skip
        self._training, self._file, self._describe = training, file, describe
        self._records = read(file)
        self._drop_beyond(start)

    @property
    def goes_back(self) -> bool:
        return self._training.on_bad_step == "rollback"

    def skip_batches(self, step: int) -> int:
        """Where a run goes on that is at `step`, if some of what follows is left out; else 0."""
        return max((r["step"] for r in self._records if r.get("from") == step), default=0)

    def skipped(self, step: int, reason: str) -> str:
        """Notes a step that changed nothing; returns what to say of it.

        Raises:
          NonFiniteError: it is one too many.
        """
        return self._noted(step, {}, reason, "it changed nothing")

    def left_out(self, bad: BadStep, newest: int) -> str:
        """Notes that a run went back to a checkpoint; raises and returns as `skipped`."""
        self._drop_beyond(newest)
        what = f"going on behind it with what was saved at step {newest}"
        return self._noted(bad.step, {"from": newest}, bad.reason, what)

    def _noted(self, step: int, since: dict[str, int], reason: str, what: str) -> str:
        most = self._training.max_bad_steps
        if len(self._records) >= most:
            raise NonFiniteError(
                f"step {step}: {reason}; {most} bad steps are all that Training.max_bad_steps "
                f"allows (see {self._file.name}): lower Optimizer.learning_rate or set "
                "Optimizer.clip_norm, look at the documents, or raise it, and run again to go on "
                "from the newest checkpoint"
            )
        made_of = {"reason": reason, "batch": self._describe(step - 1)}
        policy = self._training.on_bad_step
        self._records.append({"step": step, "policy": policy, **since, **made_of})
        self._write()
        return f"step {step}: {reason}; {what} ({len(self._records)} of at most {most} such steps)"

    def _drop_beyond(self, step: int) -> None:
        """What was skipped is seen again; what was gone around is not."""
        kept = [r for r in self._records if "from" in r or r["step"] <= step]
        if kept != self._records:
            self._records = kept
            self._write()

    def _write(self) -> None:
        if processes.is_first():
            try:
                text = "".join(json.dumps(r, allow_nan=False) + "\n" for r in self._records)
                durable.write(self._file, text.encode())
            except OSError as error:
                raise CheckpointError(
                    f"cannot write {self._file}: {error.strerror}; {durable.remedy(error)}, then "
                    "run again"
                ) from error


def read(file: Path) -> list[dict[str, Any]]:
    """The records of bad_batches.jsonl; raises CheckpointError where it is damaged."""
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
