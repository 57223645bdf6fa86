"""Documents with their summaries: each token of a summary from the document and those before."""

from jaxtyping import Array, Float, PyTree

from brt.config import Config
from brt.models import seq2seq
from brt.ops.cross_entropy import smoothed_cross_entropy
from brt.types import PairBatch


def initial_params(config: Config, key: Array) -> PyTree[Array]:
    """Of the encoder-decoder."""
    return seq2seq.init(network(config), key)


def initial_carried(config: Config, lanes: int) -> tuple[()]:
    """Nothing: each step reads whole pairs."""
    return ()


def network(config: Config, *, training: bool = False) -> seq2seq.Seq2Seq:
    """The model that a config describes."""
    return seq2seq.Seq2Seq(config.seq2seq, config.cross_attention, training, config.kernels)


def loss(
    params: PyTree[Array], carried: tuple[()], batch: PairBatch, key: Array, config: Config
) -> tuple[Float[Array, ""], tuple[Float[Array, ""], tuple[()]]]:
    """The summed loss of the summaries, given what a reader of them would have written before."""
    hidden = network(config, training=True).apply(
        {"params": params}, batch.source, batch.source_mask, batch.target_in, rngs={"dropout": key}
    )
    out = seq2seq.readout(config.seq2seq, params)
    total, nats = smoothed_cross_entropy(
        hidden, out.embedding, batch.target_out, batch.scored, out.scale,
        config.training.loss_chunk, config.training.label_smoothing, out.bias,
    )  # fmt: skip
    return total, (nats, carried)
