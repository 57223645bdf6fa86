"""What is learned. The trainer knows no model: an objective brings its parameters and its loss."""

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Array, Float, PyTree

from brt.config import Config
from brt.training.objectives import language_modeling, seq2seq
from brt.types import Batch, PairBatch


class Objective(NamedTuple):
    """Pure functions of a config.

    Attributes:
      initial_params: of a key; parameters, each boxed with the names of its axes.
      initial_carried: of a number of lanes; what is carried from step to step, without a past.
      cut_gradient: of what is carried: the same, where gradients end.
      loss: the summed loss of a batch; its summed nats, and what is carried on.
    """

    initial_params: Callable[[Config, Array], PyTree[Array]]
    initial_carried: Callable[[Config, int], PyTree[Array]]
    cut_gradient: Callable[[PyTree[Array]], PyTree[Array]]
    loss: Callable[
        [PyTree[Array], PyTree[Array], Batch | PairBatch, Array, Config],
        tuple[Float[Array, ""], tuple[Float[Array, ""], PyTree[Array]]],
    ]


_OBJECTIVES = {
    "language_modeling": Objective(
        language_modeling.initial_params,
        language_modeling.initial_carried,
        language_modeling.cut_gradients,
        language_modeling.loss,
    ),
    "seq2seq": Objective(
        seq2seq.initial_params,
        seq2seq.initial_carried,
        lambda carried: carried,
        seq2seq.loss,
    ),
}


def of(config: Config) -> Objective:
    """The objective that Training.objective names."""
    return _OBJECTIVES[config.training.objective]
