"""Base class of the evaluators of encoders with a head, such as a classifier.

A model is evaluated with the kind of attention that its config names, and on request also with the
exact attention that this kind approximates.
"""

import abc
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Array, PyTree

from brt.config import Config
from brt.distributed import rules
from brt.tasks.arguments import UNCONTROLLED, Control, EvaluationRequest
from brt.tasks.encoders import EncoderTask, TimedFunction, with_exact_attention
from brt.tasks.report import EvaluationResult, example_indices
from brt.types import Variables


class HeadResult(NamedTuple):
    """Result of the evaluation of rows of a split with one kind of attention."""

    kind: str  # a value of Attention.kind
    metrics: dict[str, Any]
    summary: str  # a phrase with the most important metrics
    rows: list[dict[str, Any]]  # the predictions as JSON, in the order of the data
    shown: list[str]  # each prediction as text for people


class HeadEvaluator(abc.ABC):
    """Base class of the evaluators of encoder tasks.

    Rows are evaluated in batches, and one program is compiled for each padded length. If `whole` is
    False, all rows are evaluated, but not again with exact attention.
    """

    # Name and format of the metric whose value with exact attention is appended to the summary.
    compared_metric: ClassVar[tuple[str, str]]
    sampled: ClassVar[int] = 8  # number of rows that `sample` reads
    unit, partial = "row", False

    def __init__(self, task: EncoderTask, request: EvaluationRequest):
        config, self.dataset = request.config, request.dataset
        self.task, self.store = task, request.dataset.split(request.split)
        self._batch_size = config.evaluation.batch_size
        self.total = len(self.store)
        self._trained = (request.trained or config).attention.kind
        other = with_exact_attention(config) if request.compare_exact else None
        configs = filter(None, (config, other))
        self._functions = [(c, TimedFunction(self.forward(c))) for c in configs]

    @property
    def batch_size(self) -> int:
        """Number of rows in a batch, a multiple of the number of devices that share them."""
        return rules.round_up("lanes", self._batch_size)

    @abc.abstractmethod
    def forward(self, config: Config) -> Callable[..., PyTree[Array]]:
        """Returns the forward pass, a function that is compiled and called for each batch.

        The function's arguments are params, a batch, and the results of `extra_inputs`. Its results
        are arrays whose first axis is the rows of the batch. `config` has the kind of attention.
        """

    def extra_inputs(self, batch: Any) -> tuple[np.ndarray, ...]:
        """Returns the arguments of the forward pass that follow the batch."""
        return ()

    @abc.abstractmethod
    def batches(self, limit: int) -> Iterator[Any]:
        """Yields batches of all rows; if `limit` is above 0, one batch of at most `limit` rows."""

    @abc.abstractmethod
    def summarize(
        self, config: Config, outputs: dict[int, tuple], timed: TimedFunction
    ) -> HeadResult:
        """Returns metrics and predictions; `outputs` has each row's results of `forward`."""

    @abc.abstractmethod
    def table(self, report: dict[str, Any], results: list[HeadResult]) -> list[str]:
        """Returns the lines of a table with a row for each kind of attention."""

    def __call__(
        self, variables: Variables, control: Control = UNCONTROLLED, *, whole: bool = True
    ) -> EvaluationResult | None:
        results = []
        for config, timed in self._functions if whole else self._functions[:1]:
            result = self._evaluate(variables.params, config, timed, 0, control)
            if result is None:
                return None
            results.append(result)
        return self._report(results)

    def sample(
        self, variables: Variables, step: int, control: Control = UNCONTROLLED
    ) -> str | None:
        stop_only = Control(control.stop)
        result = self._evaluate(variables.params, *self._functions[0], self.sampled, stop_only)
        return result and "\n".join(
            [*(result.shown[i] for i in example_indices(len(result.shown))), ""]
        )

    def _evaluate(
        self,
        params: PyTree[Array],
        config: Config,
        timed: TimedFunction,
        limit: int,
        control: Control,
    ) -> HeadResult | None:
        timed.restart()
        outputs: dict[int, tuple] = {}
        for batch in self.batches(limit):
            if control.stop():
                return None
            arrays = timed(params, batch, *self.extra_inputs(batch))
            rows = np.flatnonzero(batch.row >= 0)
            for i in rows:
                outputs[int(batch.row[i])] = tuple(x[i] for x in arrays)
            control.progress(len(rows))
        return self.summarize(config, dict(sorted(outputs.items())), timed)

    def _report(self, results: list[HeadResult]) -> EvaluationResult:
        first, (name, form) = results[0], self.compared_metric
        report = {**first.metrics, "trained_with": self._trained}
        summary = first.summary
        for other in results[1:]:
            report[f"{name}_{other.kind}"] = other.metrics[name]
            summary += f" ({other.kind}: {form.format(other.metrics[name])})"
        shown = [first.shown[i] for i in example_indices(len(first.shown))]
        return EvaluationResult(
            report, summary, {"predictions": first.rows},
            "\n".join([*self.table(report, results), "", *shown]),
            name="" if first.kind == self._trained else f"_{first.kind}",
        )  # fmt: skip


def metric_table(
    report: dict[str, Any], results: list[HeadResult], forms: dict[str, str]
) -> list[str]:
    """Returns the lines of a table with a row for each kind of attention.

    `forms` has the format of each metric that becomes a column; metrics that the report lacks are
    left out.
    """
    shown = [name for name in forms if name in report]
    head = "".join(f"{name.replace('_', ' '):>16}" for name in shown)
    lines = [f"{'attention':<20}{head}{'tokens/s':>12}"]
    for result in results:
        cells = "".join(f"{forms[name].format(result.metrics[name]):>16}" for name in shown)
        speed = result.metrics["tokens_per_second"]
        lines.append(f"{result.kind:<20}{cells}{speed:>12,.0f}")
    return lines
