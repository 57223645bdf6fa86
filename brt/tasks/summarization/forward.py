"""The forward pass, which loss, evaluation and generation share."""

from typing import NamedTuple

from jaxtyping import Array, Float, PyTree

from brt.config import Config
from brt.models import seq2seq
from brt.models.seq2seq import Readout
from brt.types import PairBatch


class Prediction(NamedTuple):
    """Vectors of every token of the summaries, and what makes logits of them."""

    hidden: Float[Array, "B T D"]
    out: Readout


def network(config: Config, *, training: bool = False) -> seq2seq.Seq2Seq:
    """The model that a config describes."""
    return seq2seq.Seq2Seq(config.seq2seq, config.cross_attention, training)


def predict(
    config: Config, params: PyTree[Array], batch: PairBatch, dropout: Array | None = None
) -> Prediction:
    """Each token of the summaries, given what a reader of them would have written before.

    Args:
      dropout: the key of a training step's; None: nothing is dropped.
    """
    hidden = network(config, training=dropout is not None).apply(
        {"params": params}, batch.source, batch.source_mask, batch.target_in,
        rngs=None if dropout is None else {"dropout": dropout},
    )  # fmt: skip
    return Prediction(hidden, seq2seq.readout(config.seq2seq, params))
