"""Evaluators and scorers: what a task offers to measure a trained model."""

from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float

from brt.tasks.arguments import Control
from brt.tasks.report import EvaluationResult
from brt.types import Variables


@runtime_checkable
class Evaluator(Protocol):
    """Evaluates one split. The variables may change between calls; the first call compiles.

    Attributes:
      total: number of units to read, in the unit that is passed to `Control.progress`.
      unit: name of the unit, "tok" or "row".
      partial: True if an evaluation with `whole=False` reads only a part of the data, so that its
          metrics cannot be compared with those of a whole evaluation.
    """

    total: int
    unit: str
    partial: bool

    def __call__(
        self, variables: Variables, control: Control = ..., *, whole: bool = True
    ) -> EvaluationResult | None:
        """Returns the metrics of the split, or None if `control` stopped the evaluation.

        Args:
          whole: False evaluates only a quick part, as training does before its last step.
        """

    def sample(self, variables: Variables, step: int, control: Control = ...) -> str | None:
        """Returns example outputs of the model on the split, or None if `control` stopped it.

        Args:
          variables: the learned values of the model.
          step: training steps that the model has completed; random numbers depend on it.
          control: functions that stop the work and report its progress.
        """


@runtime_checkable
class Scorer(Protocol):
    """Computes the loss of single texts. The variables may change between calls; the first call
    compiles.
    """

    def __call__(self, variables: Variables, tokens: np.ndarray) -> Float[np.ndarray, " T"]:
        """Returns the negative log-likelihood in nats of each token of one document."""
