"""The loss of a segment: every token from those before it."""

from jaxtyping import Array, Float, PyTree

from brt.config import Config
from brt.layers.stack import StackState
from brt.models.decoder import logit_scale
from brt.ops.cross_entropy import smoothed_cross_entropy
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
    """The summed loss of a batch; its nats, and the state after it."""
    training = config.training
    hidden, carry = predict(config, params, carry, batch, key)
    total, nats = smoothed_cross_entropy(
        hidden, params["embedding"], batch.targets, batch.scored,
        logit_scale(config.model), training.loss_chunk, training.label_smoothing,
    )  # fmt: skip
    return total, Aux(nats, count_of(batch.scored), carry, model_state, {})
