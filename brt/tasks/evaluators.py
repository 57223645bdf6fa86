"""Interfaces of evaluators and scorers, the objects by which a task measures a trained model."""

from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float

from brt.tasks.arguments import Control
from brt.tasks.report import EvaluationResult
from brt.types import Variables


@runtime_checkable
class Evaluator(Protocol):
    """Evaluates models on one split of the data.

    The variables (the learned arrays of the model) are an argument, so that training can evaluate
    the model repeatedly with one evaluator. The first call compiles.

    Attributes:
      total: number of units to read, in the unit that is passed to `Control.progress`.
      unit: name of the unit, "tok" or "row".
      partial: True if an evaluation with `whole=False` reads only a part of the data. Its metrics
          cannot be compared with the metrics of a whole evaluation.
    """

    total: int
    unit: str
    partial: bool

    def __call__(
        self, variables: Variables, control: Control = ..., *, whole: bool = True
    ) -> EvaluationResult | None:
        """Returns the metrics of the split, or None if `control` stopped the evaluation.

        Args:
          variables: the learned arrays of the model.
          control: functions that interrupt the evaluation and report its progress.
          whole: True evaluates the whole split. False evaluates a part, which takes less time, as
            training does before its last step.
        """

    def sample(self, variables: Variables, step: int, control: Control = ...) -> str | None:
        """Returns example outputs of the model on the split, as text for people.

        The result is None if `control` stopped the work.

        Args:
          variables: the learned arrays of the model.
          step: number of training steps that the model has completed, on which random numbers
            depend.
          control: functions that interrupt the work and report its progress.
        """


@runtime_checkable
class Scorer(Protocol):
    """Computes the loss of each token of single texts. The first call compiles."""

    def __call__(self, variables: Variables, tokens: np.ndarray) -> Float[np.ndarray, " T"]:
        """Returns the negative log-likelihood in nats of each token of one document.

        Args:
          variables: the learned arrays of the model.
          tokens: int [T], the tokens of the document, without BOS.
        """
