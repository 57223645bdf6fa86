"""Questions about texts, and where in these their answers start and end."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from brt.config import Config
from brt.ops.spans import span_nats
from brt.training.objectives.encoders import network
from brt.types import TextBatch

_DROPOUT, _ATTENTION = 0, 1  # what the key of a step is folded with


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
