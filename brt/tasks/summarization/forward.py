"""The forward pass, which loss, evaluation and generation share."""

from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float, PyTree

from brt.config import Config
from brt.models import seq2seq
from brt.models.seq2seq import Readout
from brt.types import PairBatch

_PURPOSES = 0, 1  # dropout, attention: what the key of a step is folded with


class Prediction(NamedTuple):
    """Vectors of every token of the summaries, what makes logits of them, what there is to log."""

    hidden: Float[Array, "B T D"]
    out: Readout
    metrics: dict[str, Float[Array, ""]]


def network(config: Config, *, training: bool = False) -> seq2seq.Seq2Seq:
    """The model that a config describes."""
    return seq2seq.Seq2Seq(
        config.seq2seq, config.cross_attention, training, config.attention, config.kernels
    )


def predict(
    config: Config, params: PyTree[Array], batch: PairBatch, key: jax.Array | None = None
) -> Prediction:
    """Each token of the summaries, given what a reader of them would have written before.

    Args:
      key: of a training step; None: nothing is dropped, and what is random is always the same.
    """
    dropout, attention = None, None
    if key is not None:
        dropout, attention = (jax.random.fold_in(key, purpose) for purpose in _PURPOSES)
    found: Any = network(config, training=key is not None).apply(
        {"params": params}, batch.source, batch.source_mask, batch.target_in, attention,
        rngs=None if dropout is None else {"dropout": dropout},
    )  # fmt: skip
    return Prediction(found.hidden, seq2seq.readout(config.seq2seq, params), found.metrics)
