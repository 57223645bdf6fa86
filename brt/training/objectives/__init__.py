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
    seq2seq,
    spans,
)
from brt.types import AnyBatch


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
    loss: Callable[
        [PyTree[Array], PyTree[Array], AnyBatch, Array, Config],
        tuple[Float[Array, ""], tuple[Float[Array, ""], PyTree[Array]]],
    ]
    scored: Callable[[AnyBatch, Config], Int[Array, ""]]


def _all_scored(batch: AnyBatch, config: Config) -> Int[Array, ""]:
    return jnp.sum(batch.scored)


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
    "masked_language_modeling": Objective(
        encoders.initial_params,
        encoders.initial_carried,
        lambda carried: carried,
        masked_language_modeling.loss,
        masked_language_modeling.scored,
    ),
    "ctc": Objective(
        encoders.initial_params,
        encoders.initial_carried,
        lambda carried: carried,
        ctc.loss,
        _all_scored,
    ),
    "classification": Objective(
        encoders.initial_params,
        encoders.initial_carried,
        lambda carried: carried,
        classification.loss,
        _all_scored,
    ),
    "spans": Objective(
        encoders.initial_params,
        encoders.initial_carried,
        lambda carried: carried,
        spans.loss,
        _all_scored,
    ),
}


def of(config: Config) -> Objective:
    """The objective that Training.objective names."""
    return _OBJECTIVES[config.training.objective]
