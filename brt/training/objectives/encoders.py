"""What all objectives of encoders share: the model, and that nothing is carried."""

import jax
from jaxtyping import Array, Float, PyTree

from brt.config import Config
from brt.models import encoder
from brt.types import TextBatch

_DROPOUT, _ATTENTION = 0, 1  # what the key of a step is folded with


def network(config: Config, *, training: bool = False) -> encoder.EncoderWithHead:
    """The encoder that a config describes, with the head of its objective."""
    return encoder.EncoderWithHead(
        config.encoder, config.attention, config.training.objective, training, config.kernels
    )


def initial_params(config: Config, key: Array) -> PyTree[Array]:
    """Of the encoder and its head."""
    return encoder.init(network(config), key)


def initial_carried(config: Config, lanes: int) -> tuple[()]:
    """Nothing: each step reads whole inputs."""
    return ()


def training_logits(
    params: PyTree[Array], batch: TextBatch, key: Array, config: Config
) -> Float[Array, "B ..."]:
    """What the head gives of a batch of a training step, whose key is `key`."""
    dropout, attention = (jax.random.fold_in(key, purpose) for purpose in (_DROPOUT, _ATTENTION))
    return network(config, training=True).apply(
        {"params": params}, batch.tokens, batch.valid, attention, rngs={"dropout": dropout}
    )
