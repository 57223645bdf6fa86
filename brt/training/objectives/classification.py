"""Sentences, or pairs of them, with their labels."""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from brt.config import Config
from brt.training.objectives.encoders import training_logits
from brt.types import TextBatch


def loss(
    params: PyTree[Array], carried: tuple[()], batch: TextBatch, key: Array, config: Config
) -> tuple[Float[Array, ""], tuple[Float[Array, ""], tuple[()]]]:
    """The summed cross-entropy of the labels, smoothed as Training.label_smoothing says."""
    logits = training_logits(params, batch, key, config)
    nats = jnp.sum(label_nats(logits, batch))
    share = config.training.label_smoothing
    if not share:
        return nats, (nats, carried)
    of_all = -jnp.mean(jax.nn.log_softmax(logits), axis=-1)
    smoothed = (1 - share) * nats + share * jnp.sum(jnp.where(batch.scored[:, 0], of_all, 0.0))
    return smoothed, (nats, carried)


def label_nats(logits: Float[Array, "B C"], batch: TextBatch) -> Float[Array, " B"]:
    """-log p of each label; 0 in empty rows."""
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets[:, 0])
    return jnp.where(batch.scored[:, 0], nats, 0.0)
