"""Sentences, or pairs of them, with a number each."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from brt.config import Config
from brt.training.objectives.encoders import training_logits
from brt.types import TextBatch


def loss(
    params: PyTree[Array], carried: tuple[()], batch: TextBatch, key: Array, config: Config
) -> tuple[Float[Array, ""], tuple[Float[Array, ""], tuple[()]]]:
    """The summed nats of the numbers, which is half of their squared errors and a constant."""
    nats = jnp.sum(number_nats(training_logits(params, batch, key, config), batch))
    return nats, (nats, carried)


def number_nats(logits: Float[Array, "B 1"], batch: TextBatch) -> Float[Array, " B"]:
    """-log p of each number where p is normal of variance 1 around the logit; 0 in empty rows."""
    nats = jnp.square(logits - batch.targets) / 2 + math.log(2 * math.pi) / 2
    return jnp.where(batch.scored, nats, 0.0)[:, 0]
