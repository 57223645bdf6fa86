"""What is learned. The trainer knows no model: an objective brings its parameters and its loss."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from brt.config import Config
from brt.training.objectives import (
    classification,
    ctc,
    encoders,
    language_modeling,
    masked_language_modeling,
    regression,
    seq2seq,
    spans,
)
from brt.types import AnyBatch

Loss = Callable[
    [PyTree[Array], PyTree[Array], AnyBatch, Array, Config],
    tuple[Float[Array, ""], tuple[Float[Array, ""], PyTree[Array]]],
]
Scored = Callable[[AnyBatch, Config], Int[Array, ""]]


class Objective(NamedTuple):
    """Pure functions of a config.

    Attributes:
      initial_params: of a key; parameters, each boxed with the names of its axes.
      initial_carried: of a number of lanes; what is carried from step to step, without a past.
      cut_gradient: of what is carried: the same, where gradients end.
      loss: the summed loss of a batch; its summed nats, and what is carried on.
      scored: how many tokens of a batch these are the sums of.
    """

    initial_params: Callable[[Config, Array], PyTree[Array]]
    initial_carried: Callable[[Config, int], PyTree[Array]]
    cut_gradient: Callable[[PyTree[Array]], PyTree[Array]]
    loss: Loss
    scored: Scored


def _all_scored(batch: AnyBatch, config: Config) -> Int[Array, ""]:
    return jnp.sum(batch.scored)


def _of_encoder(loss: Loss, scored: Scored = _all_scored) -> Objective:
    """An encoder's, which carries nothing."""
    carried = encoders.initial_carried
    return Objective(encoders.initial_params, carried, lambda nothing: nothing, loss, scored)


_OBJECTIVES = {
    "language_modeling": Objective(
        language_modeling.initial_params,
        language_modeling.initial_carried,
        language_modeling.cut_gradients,
        language_modeling.loss,
        _all_scored,
    ),
    "seq2seq": Objective(
        seq2seq.initial_params,
        seq2seq.initial_carried,
        lambda carried: carried,
        seq2seq.loss,
        _all_scored,
    ),
    "masked_language_modeling": _of_encoder(
        masked_language_modeling.loss, masked_language_modeling.scored
    ),
    "ctc": _of_encoder(ctc.loss),
    "classification": _of_encoder(classification.loss),
    "regression": _of_encoder(regression.loss),
    "spans": _of_encoder(spans.loss),
}


def of(config: Config) -> Objective:
    """The objective that Training.objective names."""
    return _OBJECTIVES[config.training.objective]
