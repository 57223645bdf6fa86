"""Questions about texts, and where in these their answers start and end."""

import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from brt.config import Config
from brt.ops.spans import span_nats
from brt.training.objectives.encoders import training_logits
from brt.types import TextBatch


def loss(
    params: PyTree[Array], carried: tuple[()], batch: TextBatch, key: Array, config: Config
) -> tuple[Float[Array, ""], tuple[Float[Array, ""], tuple[()]]]:
    """The summed cross-entropy of starts and ends; a window without the answer has both at 0."""
    logits = training_logits(params, batch, key, config)
    nats = jnp.sum(span_nats(logits, batch.targets, batch.scored))
    return nats, (nats, carried)
