"""Reading held-out data with an encoder and its head, by one kind of attention or by two."""

import abc
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Array, PyTree

from brt.config import Config
from brt.tasks.encoders import Timed, exact
from brt.tasks.protocol import Dataset, Progress, Stop
from brt.tasks.report import EvaluationResult, some


class HeadReading(NamedTuple):
    """Of a split, or of its beginning, with one kind of attention.

    Attributes:
      kind: of attention.
      figures: JSON.
      summary: the most telling of them in words.
      rows: JSON, one prediction each, in the order of the data.
      shown: of each, as people read it.
    """

    kind: str
    figures: dict[str, Any]
    summary: str
    rows: list[dict[str, Any]]
    shown: list[str]


class HeadEvaluator(abc.ABC):
    """Reads a store row by row; compiled once for each padded length.

    Args:
      trained: what the model was trained with.
      beside: read the whole also with what the attention only approximates.

    Attributes:
      summary: the figure that is told of the other kind of attention.
      sampled: rows that a sample reads.
    """

    summary: ClassVar[tuple[str, str]]
    sampled: ClassVar[int] = 8
    unit, partial = "row", False

    def __init__(
        self, config: Config, dataset: Dataset, split: str, trained: Config | None, beside: bool
    ):
        self.dataset, self.store = dataset, dataset.split(split)
        self.total = len(self.store)
        self._trained = (trained or config).attention.kind
        other = exact(config) if beside else None
        self._read = [(c, Timed(self.forward(c))) for c in filter(None, (config, other))]

    @abc.abstractmethod
    def forward(self, config: Config) -> Callable[..., PyTree[Array]]:
        """(params, batch, *more) -> arrays with the rows on axis 0; to be compiled."""

    def more(self, batch: Any) -> tuple[np.ndarray, ...]:
        """What `forward` reads beside the batch."""
        return ()

    @abc.abstractmethod
    def batches(self, limit: int) -> Iterator[Any]:
        """Every row once; or only the first so many, as one batch."""

    @abc.abstractmethod
    def reading(self, config: Config, found: dict[int, tuple], timed: Timed) -> HeadReading:
        """What all rows come to; `found` has what `forward` gave of each."""

    @abc.abstractmethod
    def table(self, report: dict[str, Any], readings: list[HeadReading]) -> list[str]:
        """The report as people read it, without examples."""

    def __call__(
        self,
        params: PyTree[Array],
        *,
        model_state: PyTree[Array] | None = None,
        whole: bool = True,
        stop: Stop = lambda: None,
        progress: Progress = lambda count: None,
    ) -> EvaluationResult | None:
        """See `brt.tasks.protocol.Evaluator`."""
        readings = []
        for config, timed in self._read if whole else self._read[:1]:
            reading = self._once(params, config, timed, 0, stop, progress)
            if reading is None:
                return None
            readings.append(reading)
        return self._report(readings)

    def sample(
        self,
        params: PyTree[Array],
        step: int,
        stop: Stop = lambda: None,
        *,
        model_state: PyTree[Array] | None = None,
    ) -> str | None:
        """Some rows with what the model makes of them."""
        reading = self._once(params, *self._read[0], self.sampled, stop, lambda count: None)
        return reading and "\n".join([*(reading.shown[i] for i in some(len(reading.shown))), ""])

    def _once(
        self,
        params: PyTree[Array],
        config: Config,
        timed: Timed,
        limit: int,
        stop: Stop,
        progress: Progress,
    ) -> HeadReading | None:
        timed.restart()
        found: dict[int, tuple] = {}
        for batch in self.batches(limit):
            if stop():
                return None
            outputs = timed(params, batch, *self.more(batch))
            real = np.flatnonzero(batch.row >= 0)
            for i in real:
                found[int(batch.row[i])] = tuple(x[i] for x in outputs)
            progress(len(real))
        return self.reading(config, dict(sorted(found.items())), timed)

    def _report(self, readings: list[HeadReading]) -> EvaluationResult:
        first, (name, form) = readings[0], self.summary
        report = {**first.figures, "trained_with": self._trained}
        summary = first.summary
        for other in readings[1:]:
            report[f"{name}_{other.kind}"] = other.figures[name]
            summary += f" ({other.kind}: {form.format(other.figures[name])})"
        shown = [first.shown[i] for i in some(len(first.shown))]
        return EvaluationResult(
            report, summary, {"predictions": first.rows},
            "\n".join([*self.table(report, readings), "", *shown]),
            name="" if first.kind == self._trained else f"_{first.kind}",
        )  # fmt: skip


def columns(
    report: dict[str, Any], readings: list[HeadReading], forms: dict[str, str]
) -> list[str]:
    """A line for each kind of attention: its figures, each in its form, and its speed."""
    shown = [name for name in forms if name in report]
    head = "".join(f"{name.replace('_', ' '):>16}" for name in shown)
    lines = [f"{'attention':<20}{head}{'tokens/s':>12}"]
    for reading in readings:
        cells = "".join(f"{forms[name].format(reading.figures[name]):>16}" for name in shown)
        speed = reading.figures["tokens_per_second"]
        lines.append(f"{reading.kind:<20}{cells}{speed:>12,.0f}")
    return lines
