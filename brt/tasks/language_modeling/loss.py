"""The loss of a segment: every token from those before it."""

import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from brt.config import Config
from brt.layers.stack import StackState
from brt.models.decoder import logit_scale
from brt.ops.cross_entropy import cross_entropy
from brt.tasks.language_modeling.forward import predict
from brt.tasks.protocol import Aux, count_of
from brt.types import Batch


def loss(
    config: Config,
    params: PyTree[Array],
    carry: StackState,
    model_state: PyTree[Array],
    batch: Batch,
    key: Array,
) -> tuple[Float[Array, ""], Aux]:
    """The summed loss of a batch, with the layers' own, which are per token; what goes on."""
    training = config.training
    found = predict(config, params, carry, batch, model_state, key)
    total, nats = cross_entropy(
        found.hidden, params["embedding"], batch.targets, batch.scored,
        scale=logit_scale(config.model), chunk=training.loss_chunk,
        smoothing=training.label_smoothing, implementation=config.kernels.cross_entropy,
    )  # fmt: skip
    count = count_of(batch.scored)
    # By tokens, scored or not: the same on however many devices and in however many parts.
    total += batch.scored.size * sum(found.losses.values(), jnp.zeros(()))
    metrics = {**found.metrics, **{f"loss/{name}": value for name, value in found.losses.items()}}
    return total, Aux(nats, count, found.state, found.model_state, metrics)
