"""The training loss of a segment: next-token cross-entropy, auxiliary losses of layers, and, in
runs with distillation, the KL divergence from the teacher, a model with a larger window.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from brt.config import Config
from brt.models.decoder import logit_scale, output_weights
from brt.ops.cross_entropy import cross_entropy
from brt.tasks.interface import Aux, LossInputs, count_scored
from brt.tasks.language_modeling import distillation
from brt.tasks.language_modeling.forward import predict
from brt.types import Variables


def loss(config: Config, params: PyTree[Array], inputs: LossInputs) -> tuple[Float[Array, ""], Aux]:
    """Returns the loss of a batch, summed over scored tokens, and further results.

    The loss is the cross-entropy, smoothed by Training.label_smoothing, plus the auxiliary losses
    of layers, plus, in runs with distillation, the weighted divergence from the teacher. The nats
    of the `Aux` are the cross-entropy alone, without smoothing.
    """
    training, batch = config.training, inputs.batch
    model_state, teacher = distillation.split_teacher(inputs.model_state)
    carry = distillation.student_state(inputs.carry)
    output = predict(config, Variables(params, model_state), carry, batch, inputs.key)
    total, nats = cross_entropy(
        output.hidden, output_weights(config.model, params), batch.targets, batch.scored,
        scale=logit_scale(config.model), chunk=training.loss_chunk,
        smoothing=training.label_smoothing, implementation=config.kernels.cross_entropy,
    )  # fmt: skip
    count = count_scored(batch.scored)
    # Auxiliary losses are means over tokens. Multiplying them by the number of all tokens, scored
    # or not, makes their sum independent of the number of devices and microbatches.
    total += batch.scored.size * sum(output.losses.values(), jnp.zeros(()))
    losses = {f"loss/{name}": value for name, value in output.losses.items()}
    state, after = output.state, {**output.model_state, **teacher}
    if isinstance(inputs.carry, distillation.DistillationCarry):
        nats_apart, teacher_state = distillation.divergence(
            config, params, output, batch, teacher, inputs.carry.teacher
        )
        total += config.distillation.weight * nats_apart
        losses["loss/divergence"] = nats_apart / jnp.maximum(count, 1.0)
        state = distillation.DistillationCarry(state, teacher_state)
    return total, Aux(nats, count, state, after, {**output.metrics, **losses})
