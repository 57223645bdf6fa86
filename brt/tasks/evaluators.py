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
    """

    total: int  # number of units to read, as passed to `Control.progress`
    unit: str  # "tok" or "row"
    # True if an evaluation with `whole=False` reads only a part of the data. Its metrics cannot be
    # compared with the metrics of a whole evaluation.
    partial: bool

    def __call__(
        self, variables: Variables, control: Control = ..., *, whole: bool = True
    ) -> EvaluationResult | None:
        """Returns the metrics of the split, or None if `control` stopped the evaluation.

        If `whole` is False, only a part may be evaluated, to save time before the last training
        step.
        """

    def sample(self, variables: Variables, step: int, control: Control = ...) -> str | None:
        """Returns example outputs for people; None if `control` stopped the work.

        Random numbers depend on `step`, the number of completed training steps.
        """


@runtime_checkable
class Scorer(Protocol):
    """Computes the loss of each token of single texts. The first call compiles."""

    def __call__(self, variables: Variables, tokens: np.ndarray) -> Float[np.ndarray, " T"]:
        """Returns the loss in nats of each token of a document, whose `tokens` lack BOS."""
