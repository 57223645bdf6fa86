"""Documents, segment after segment: each token from those before it."""

import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from brt.config import Config
from brt.layers.stack import StackState, new_model_state
from brt.layers.state import cut_gradient
from brt.models.decoder import Decoder, logit_scale, new_state
from brt.ops.cross_entropy import smoothed_cross_entropy
from brt.types import Batch


def initial_params(config: Config, key: Array) -> PyTree[Array]:
    """Of the decoder."""
    model = config.model
    tokens = jnp.zeros((1, model.window), jnp.int32)
    start = jnp.ones((1, 1), bool)
    state, model_state = new_state(model, 1), new_model_state(model)
    return Decoder(model).init(key, tokens, state, start, model_state)["params"]


def initial_carried(config: Config, lanes: int) -> StackState:
    """Caches and recurrent states without a past."""
    return new_state(config.model, lanes)


def cut_gradients(carried: StackState) -> StackState:
    """Gradients end where the past comes in."""
    return cut_gradient(carried)


def loss(
    params: PyTree[Array], carried: StackState, batch: Batch, key: Array, config: Config
) -> tuple[Float[Array, ""], tuple[Float[Array, ""], StackState]]:
    """The summed loss of a batch; its nats, and the state after it."""
    model, training = config.model, config.training
    hidden, carried, *_ = Decoder(model, training=True).apply(
        {"params": params}, batch.inputs, carried, batch.document_start, rngs={"dropout": key}
    )
    total, nats = smoothed_cross_entropy(
        hidden, params["embedding"], batch.targets, batch.scored,
        logit_scale(model), training.loss_chunk, training.label_smoothing,
    )  # fmt: skip
    return total, (nats, carried)
