"""Evaluators, scorers and probes: what a task offers to measure a trained model."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array, Float, PyTree

from brt.tasks.report import EvaluationResult

Stop = Callable[[], object]  # Returns a true value if the work shall stop.
Progress = Callable[[int], object]  # Is called with the number of units read since the last call.


@runtime_checkable
class Evaluator(Protocol):
    """Evaluates one split. Parameters may change between calls; the first call compiles.

    Attributes:
      total: number of units to read, in the unit that is passed to `progress`.
      unit: name of the unit, "tok" or "row".
      partial: True if an evaluation with `whole=False` reads only a part of the data, so that its
          metrics cannot be compared with those of a whole evaluation.
    """

    total: int
    unit: str
    partial: bool

    def __call__(
        self,
        params: PyTree[Array],
        *,
        model_state: PyTree[Array] | None = None,
        whole: bool = True,
        stop: Stop = ...,
        progress: Progress = ...,
    ) -> EvaluationResult | None:
        """Returns the metrics of the split, or None if `stop` returned a true value on the way.

        Args:
          whole: False evaluates only a quick part, as training does before its last step.
        """

    def sample(
        self,
        params: PyTree[Array],
        step: int,
        stop: Stop = ...,
        *,
        model_state: PyTree[Array] | None = None,
    ) -> str | None:
        """Returns example outputs of the model on the split, or None if `stop` returned a true
        value."""


@runtime_checkable
class Scorer(Protocol):
    """Scores texts. Parameters may change between calls; the first call compiles."""

    def __call__(
        self, params: PyTree[Array], tokens: np.ndarray, model_state: PyTree[Array] | None = None
    ) -> Float[np.ndarray, " T"]:
        """Returns the negative log-likelihood in nats of each token of one document."""


class Inspection(NamedTuple):
    """Results of a probe: JSON, the same as text for people, and a function that draws PNGs by
    name."""

    metrics: dict[str, Any]
    text: str
    draw: Callable[[], Mapping[str, bytes]]
