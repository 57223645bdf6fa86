"""The forward pass of summarization, for training and evaluation.

In shapes, B is the number of pairs in a batch, T the padded number of tokens of a summary, and D
the width of the model.
"""

from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float, PyTree

from brt.config import Config
from brt.models import seq2seq
from brt.models.seq2seq import Readout
from brt.types import PairBatch

# The random keys of a step for dropout and for attention are made from the key of the step by
# folding in the first and the second of these numbers.
_PURPOSES = 0, 1


class Prediction(NamedTuple):
    """Output of the forward pass."""

    # The decoder's last hidden vectors, from which each token of a summary is predicted.
    hidden: Float[Array, "B T D"]
    readout: Readout  # maps the hidden vectors to logits
    metrics: dict[str, Float[Array, ""]]  # scalars that training logs, by name


def network(config: Config, *, training: bool = False) -> seq2seq.Seq2Seq:
    """Returns the encoder-decoder that a config describes; `training` enables dropout."""
    return seq2seq.Seq2Seq(
        config.seq2seq, config.cross_attention, training, config.attention, config.kernels
    )


def predict(
    config: Config, params: PyTree[Array], batch: PairBatch, key: jax.Array | None = None
) -> Prediction:
    """Returns the hidden vectors from which the tokens of summaries are predicted.

    Each vector depends on the document and on the true tokens of the summary before the predicted
    token. None in `key` disables dropout and makes random choices constant.
    """
    dropout, attention = None, None
    if key is not None:
        dropout, attention = (jax.random.fold_in(key, purpose) for purpose in _PURPOSES)
    output: Any = network(config, training=key is not None).apply(
        {"params": params}, batch.source, batch.source_mask, batch.target_in, attention,
        rngs=None if dropout is None else {"dropout": dropout},
    )  # fmt: skip
    return Prediction(output.hidden, seq2seq.readout(config.seq2seq, params), output.metrics)
