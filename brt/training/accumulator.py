"""Accumulates the metrics of steps, one step late so that the device never waits for the host."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax

from brt.training.bad_steps import BadStep, RecentLosses
from brt.training.step import StepMetrics

_REMEDY = (
    "lower Optimizer.learning_rate or lengthen Optimizer.warmup_steps, and run again to go on from "
    "the newest checkpoint, or set Optimizer.clip_norm in a new run"
)


class MetricAccumulator:
    """Totals of the metrics since the last report, and of the tokens since step 0.

    The state is saved in checkpoints, so that a resumed run reports the same numbers.

    Args:
      saved: the result of `state` in a checkpoint; None at step 0.
      spike_factor: Training.spike_factor; see `RecentLosses`.
      on_skip: called with the number of every step that left the train state unchanged, and why.

    Attributes:
      tokens_seen: scored tokens (targets that are not padding) since step 0, without skipped steps.
      skipped: number of steps since step 0 without an update.
    """

    def __init__(
        self,
        saved: dict[str, Any] | None = None,
        *,
        spike_factor: float = 0.0,
        on_skip: Callable[[int, str], object] = lambda step, reason: None,
    ):
        self._factor, self._on_skip = spike_factor, on_skip
        self.restore(saved)

    def restore(self, saved: dict[str, Any] | None) -> None:
        """Replaces all totals, by 0 if `saved` is None, and drops the metrics of a running step."""
        self.tokens_seen = self.skipped = 0
        self._restart()
        self._recent = RecentLosses(self._factor, saved.get("usual", ()) if saved else ())
        if saved:
            self.tokens_seen, self._nats, self._tokens = (
                saved["tokens_seen"], saved["nats"], saved["tokens"],
            )  # fmt: skip
            self._norms, self._steps = saved["norms"], saved["steps"]
            self._others: Counter[str] = Counter(saved["others"])
            self.skipped = saved.get("skipped", 0)
        self._pending: tuple[int, StepMetrics] | None = None

    def limit(self, step: int) -> float:
        return self._recent.limit(step)

    def add(self, step: int, metrics: StepMetrics) -> None:
        """Stores the metrics of a step without waiting for it, and adds those of the previous step.

        It raises BadStep for the previous step; see `flush`.
        """
        self.flush()
        self._pending = step, metrics

    def flush(self) -> None:
        """Waits for the step that `add` stored, and adds the step's metrics to the totals.

        Raises:
          BadStep: the loss or gradients of the step were not finite, or its loss exceeded the
            limit. If Training.on_bad_step is "skip", `on_skip` is called instead.
        """
        if self._pending is None:
            return
        (step, metrics), self._pending = self._pending, None
        *sums, others, skipped = jax.device_get(metrics)
        nats, tokens, norm = map(float, sums)
        if skipped:
            self.skipped += 1
            self._on_skip(
                step, self._problem(step, nats, tokens, norm) or "the update is not finite"
            )
            return
        if skipped is None and (reason := self._problem(step, nats, tokens, norm)):
            raise BadStep(step, reason, _REMEDY)
        self._recent.add(step, nats / max(tokens, 1.0))
        self._nats += nats
        self._tokens += tokens
        self._norms += norm
        self._others.update({name: float(value) for name, value in others.items()})
        self._steps += 1
        self.tokens_seen += int(tokens)

    def _problem(self, step: int, nats: float, tokens: float, norm: float) -> str:
        """Says what is wrong with a step; "" if nothing is."""
        if not (math.isfinite(nats) and math.isfinite(norm)):
            return f"the loss ({nats} nats) or the gradient norm ({norm}) is not finite"
        loss, limit = nats / max(tokens, 1.0), self.limit(step)
        if loss <= limit:
            return ""
        return (
            f"the loss ({loss:.4g}) is above {limit:.4g}, Training.spike_factor = {self._factor} "
            "times the median of recent losses"
        )

    def bits_per_token(self) -> float:
        """Returns the mean bits per token of the steps since the last call of `report`."""
        self.flush()
        return self._nats / max(self._tokens, 1.0) / math.log(2)

    def report(self) -> dict[str, float]:
        """Returns the averages of the metrics since the last call, by tag, and resets them.

        "data/tokens" is not an average, but the number of scored tokens since step 0.
        """
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
        """Returns the totals as JSON, for a checkpoint; `flush` has to be called first."""
        return {
            "tokens_seen": self.tokens_seen,
            "nats": self._nats,
            "tokens": self._tokens,
            "norms": self._norms,
            "steps": self._steps,
            "others": dict(self._others),
            "skipped": self.skipped,
            "usual": self._recent.state(),
        }
