"""The forward pass, which loss, evaluation and probes share."""

import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from brt.config import Config
from brt.layers.stack import StackState
from brt.models.decoder import Decoder, logit_scale
from brt.ops.cross_entropy import token_nats
from brt.types import Batch


def predict(
    config: Config,
    params: PyTree[Array],
    carry: StackState,
    batch: Batch,
    dropout: Array | None = None,
) -> tuple[Float[Array, "B T D"], StackState]:
    """Vectors of every token of a segment, and the state after it.

    Args:
      dropout: the key of a training step's; None: nothing is dropped.
    """
    return Decoder(config.model, training=dropout is not None).apply(
        {"params": params}, batch.inputs, carry, batch.document_start,
        rngs=None if dropout is None else {"dropout": dropout},
    )  # fmt: skip


def segment_nats(
    config: Config, params: PyTree[Array], carry: StackState, batch: Batch
) -> tuple[Float[Array, "B T"], StackState]:
    """Nats of every token of a segment, 0 where it is not scored, and the state after it."""
    model = config.model
    hidden, carry = predict(config, params, carry, batch)
    nats = token_nats(
        hidden, params["embedding"], batch.targets,
        scale=logit_scale(model), chunk=config.training.loss_chunk,
    )  # fmt: skip
    return jnp.where(batch.scored, nats, 0.0), carry


def block_nats(
    config: Config, params: PyTree[Array], carry: StackState, batch: Batch
) -> tuple[Float[Array, "B N"], StackState]:
    """Nats of every block of a segment, and the state after it."""
    nats, carry = segment_nats(config, params, carry, batch)
    return jnp.sum(nats.reshape(nats.shape[0], -1, config.model.window), axis=2), carry
