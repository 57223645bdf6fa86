"""Sums of an interval's metrics, fetched one step late so that the device never waits."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax

from brt.training.bad_steps import BadStep, Usual
from brt.training.step import StepMetrics

_REMEDY = (
    "lower Optimizer.learning_rate, lengthen Optimizer.warmup_steps, or set Optimizer.clip_norm, "
    "and run again to go on from the newest checkpoint"
)


class MetricAccumulator:
    """Totals since the last report and since step 0.

    Its state goes into checkpoints, so that a resumed run reports the same numbers.

    Args:
      saved: what `state` gave; None at step 0.
      spike_factor: Training.spike_factor.
      skipped: told of every step that changed nothing, and why.

    Attributes:
      skipped: steps of the run that have no update.
    """

    def __init__(
        self,
        saved: dict[str, Any] | None = None,
        *,
        spike_factor: float = 0.0,
        skipped: Callable[[int, str], object] = lambda step, reason: None,
    ):
        self._factor, self._tell = spike_factor, skipped
        self.go_back(saved)

    def go_back(self, saved: dict[str, Any] | None) -> None:
        """Counts on from a state; what is in flight does not count."""
        self.tokens_seen = self.skipped = 0
        self._restart()
        self._usual = Usual(self._factor, saved.get("usual", ()) if saved else ())
        if saved:
            self.tokens_seen, self._nats, self._tokens = (
                saved["tokens_seen"], saved["nats"], saved["tokens"],
            )  # fmt: skip
            self._norms, self._steps = saved["norms"], saved["steps"]
            self._others: Counter[str] = Counter(saved["others"])
            self.skipped = saved.get("skipped", 0)
        self._pending: tuple[int, StepMetrics] | None = None

    def limit(self, step: int) -> float:
        """The loss above which this step is bad."""
        return self._usual.limit(step)

    def add(self, step: int, metrics: StepMetrics) -> None:
        """Takes the metrics of a step in flight, and counts those of the step before.

        Raises:
          BadStep: a loss or gradient was NaN or infinite, or a loss beyond the limit.
        """
        self.flush()
        self._pending = step, metrics

    def flush(self) -> None:
        """Waits for the step in flight and counts it."""
        if self._pending is None:
            return
        (step, metrics), self._pending = self._pending, None
        *sums, others, skipped = jax.device_get(metrics)
        nats, tokens, norm = map(float, sums)
        if skipped:
            self.skipped += 1
            self._tell(step, self._wrong(step, nats, tokens, norm) or "its update is not finite")
            return
        if skipped is None and (reason := self._wrong(step, nats, tokens, norm)):
            raise BadStep(step, reason, _REMEDY)
        self._usual.add(step, nats / max(tokens, 1.0))
        self._nats += nats
        self._tokens += tokens
        self._norms += norm
        self._others.update({name: float(value) for name, value in others.items()})
        self._steps += 1
        self.tokens_seen += int(tokens)

    def _wrong(self, step: int, nats: float, tokens: float, norm: float) -> str:
        if not (math.isfinite(nats) and math.isfinite(norm)):
            return f"the loss ({nats} nats) or the gradient norm ({norm}) is not finite"
        loss, limit = nats / max(tokens, 1.0), self.limit(step)
        if loss <= limit:
            return ""
        return (
            f"the loss ({loss:.4g}) is above {limit:.4g}, Training.spike_factor = {self._factor} "
            "times the usual"
        )

    def bits_per_token(self) -> float:
        """Of the interval so far; the next report counts it, too."""
        self.flush()
        return self._nats / max(self._tokens, 1.0) / math.log(2)

    def report(self) -> dict[str, float]:
        """Averages over the interval; starts the next one."""
        tokens = max(self._tokens, 1.0)
        values = {
            "train/loss": self._nats / tokens,
            "train/bits_per_token": self._nats / tokens / math.log(2),
            "train/gradient_norm": self._norms / max(self._steps, 1),
            "data/tokens": self.tokens_seen,
            **{f"train/{name}": x / max(self._steps, 1) for name, x in self._others.items()},
        }
        self._restart()
        return values

    def _restart(self) -> None:
        self._nats = self._tokens = self._norms = 0.0
        self._steps = 0
        self._others = Counter()

    def state(self) -> dict[str, Any]:
        """JSON that `__init__` takes up again; nothing may be in flight."""
        return {
            "tokens_seen": self.tokens_seen,
            "nats": self._nats,
            "tokens": self._tokens,
            "norms": self._norms,
            "steps": self._steps,
            "others": dict(self._others),
            "skipped": self.skipped,
            "usual": self._usual.state(),
        }
