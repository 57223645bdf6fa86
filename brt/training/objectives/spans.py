"""Questions about texts, and where in these their answers start and end."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from brt.config import Config
from brt.models import encoder
from brt.ops.spans import span_nats
from brt.types import TextBatch

_DROPOUT, _ATTENTION = 0, 1  # what the key of a step is folded with


def network(config: Config, *, training: bool = False) -> encoder.EncoderWithHead:
    """The encoder that a config describes."""
    return encoder.EncoderWithHead(config.encoder, config.attention, "spans", training)


def initial_params(config: Config, key: Array) -> PyTree[Array]:
    """Of the encoder and its head."""
    return encoder.init(network(config), key)


def initial_carried(config: Config, lanes: int) -> tuple[()]:
    """Nothing: each step reads whole windows."""
    return ()


def loss(
    params: PyTree[Array], carried: tuple[()], batch: TextBatch, key: Array, config: Config
) -> tuple[Float[Array, ""], tuple[Float[Array, ""], tuple[()]]]:
    """The summed cross-entropy of starts and ends; a window without the answer has both at 0."""
    dropout, attention = (jax.random.fold_in(key, purpose) for purpose in (_DROPOUT, _ATTENTION))
    logits = network(config, training=True).apply(
        {"params": params}, batch.tokens, batch.valid, attention, rngs={"dropout": dropout}
    )
    nats = jnp.sum(span_nats(logits, batch.targets, batch.scored))
    return nats, (nats, carried)
