"""The training loss of a language model.

It consists of next-token cross-entropy, auxiliary losses of layers, and, in runs with distillation,
the KL divergence from a teacher.

In runs with distillation, the trained model learns from a teacher: the pretrained model of
Training.init_from, which reads with a larger window. The teacher is a part of the train state, so
that a run resumes without the directory of Training.init_from. The teacher's parameters are an
entry of the model state (arrays that are not trained by gradients), and the teacher's caches are a
part of the carry.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from brt.config import Config, Model
from brt.config.checks import check
from brt.errors import CheckpointError
from brt.formatting import listed
from brt.layers.runs import ModelState, StackState
from brt.models.decoder import forward_flops_per_token, logit_scale, output_weights
from brt.ops.cross_entropy import cross_entropy
from brt.ops.distillation import summed_divergence
from brt.tasks.interface import Aux, LossInputs, count_scored
from brt.tasks.language_modeling import warm_start
from brt.tasks.language_modeling.forward import predict
from brt.tasks.weights import Weights
from brt.types import Variables

TEACHER = "teacher"  # The entry of the model state with the teacher's parameters.


class DistillationCarry(NamedTuple):
    """The carry (caches and states that one step hands to the next) of a run with distillation."""

    student: StackState
    teacher: StackState  # has more cached tokens, because the teacher's window is larger


def distills(config: Config) -> bool:
    """Returns True if the trained model also learns from a teacher."""
    return config.distillation.window > 0


def teacher_config(config: Config) -> Config:
    """Returns the config of the teacher: the decoder of the run, but with Distillation.window as
    its window, without dropout, and with sliding-window layers only.
    """
    sliding = dataclasses.replace(config.model.sliding, block=config.model.block_length)
    model = dataclasses.replace(
        config.model, window=config.distillation.window, sliding=sliding, kinds=(),
        feedback=False, dropout=0.0,
    )  # fmt: skip
    return dataclasses.replace(config, model=model)


def check_distillation(config: Config) -> None:
    """Raises ConfigError if the teacher has no weights, or if settings do not fit the teacher."""
    window = config.distillation.window
    if not window:
        return
    check(
        bool(config.training.init_from),
        f"Distillation.window = {window} needs a pretrained model as the teacher; name its "
        "directory in Training.init_from",
    )
    check(
        window >= config.model.window,
        f"Distillation.window = {window} must be at least Model.window = {config.model.window}: "
        "the teacher reads with the larger window",
    )
    teacher_config(config)  # The constructor of the model checks the other settings.


def student_state(carry: StackState | DistillationCarry) -> StackState:
    """Returns the part of a run's carry that belongs to the trained model, not to a teacher."""
    return carry.student if isinstance(carry, DistillationCarry) else carry


def carry_of(config: Config, make: Callable[[Model], StackState]) -> StackState | DistillationCarry:
    """Returns `make(config.model)` and, with distillation, also the result for the teacher."""
    student = make(config.model)
    if not distills(config):
        return student
    return DistillationCarry(student, make(teacher_config(config).model))


def split_teacher(model_state: ModelState) -> tuple[ModelState, ModelState]:
    """Returns the model state of the trained model, and a dict with the teacher's parameters.

    The second dict has the single entry `TEACHER`, or no entry if there is no teacher.
    """
    own = {name: state for name, state in model_state.items() if name != TEACHER}
    return own, {name: model_state[name] for name in model_state.keys() - own.keys()}


def start_teacher(config: Config, weights: Weights, initial: PyTree[Array]) -> PyTree[Array]:
    """Returns the parameters of the teacher, which are taken from the weights.

    `initial` has the names and shapes of these parameters. Raises CheckpointError if the weights
    belong to a decoder with other layers than sliding-window ones.
    """
    start = warm_start.start(teacher_config(config).model, weights, initial)
    if other := [*start.missing, *start.unused]:
        raise CheckpointError(
            f"Distillation.window needs a teacher whose layers have windows alone, but "
            f"{weights.where} differs in {listed(other)}; set Distillation.window = 0, or "
            "name another directory in Training.init_from"
        )
    return start.params


def extra_flops_per_token(config: Config) -> int:
    """Returns the FLOPs per token that distillation adds to a train step."""
    if not distills(config):
        return 0
    logits = 2 * config.model.model_dim * config.model.vocab_size
    # Besides the teacher's forward pass, the KL divergence needs five matrix products, each of as
    # many FLOPs as the logits: the trained model's logits in the forward pass, both models' logits
    # again in the backward pass, and two products for gradients.
    return forward_flops_per_token(teacher_config(config).model) + 5 * logits


def loss(config: Config, params: PyTree[Array], inputs: LossInputs) -> tuple[Float[Array, ""], Aux]:
    """Returns the loss of a batch, which is a sum over tokens, and further results.

    The loss is the sum of these terms:

      * the cross-entropy, smoothed by Training.label_smoothing and summed over scored tokens;
      * the auxiliary losses of layers, multiplied by the number of all tokens;
      * in runs with distillation, the KL divergence from the teacher, summed over scored tokens and
        multiplied by Distillation.weight.

    The nats of the `Aux` are the cross-entropy alone, without smoothing.
    """
    training, batch = config.training, inputs.batch
    model_state, teacher = split_teacher(inputs.model_state)
    carry = student_state(inputs.carry)
    output = predict(config, Variables(params, model_state), carry, batch, inputs.key)
    total, nats = cross_entropy(
        output.hidden, output_weights(config.model, params), batch.targets, batch.scored,
        scale=logit_scale(config.model), soft_cap=config.model.embedding.soft_cap,
        chunk=training.loss_chunk, smoothing=training.label_smoothing,
        implementation=config.kernels.cross_entropy,
    )  # fmt: skip
    count = count_scored(batch.scored)
    # Auxiliary losses are means over tokens. Multiplying them by the number of all tokens, scored
    # or not, makes their sum independent of the number of devices and microbatches.
    total += batch.scored.size * sum(output.losses.values(), jnp.zeros(()))
    losses = {f"loss/{name}": value for name, value in output.losses.items()}
    state, after = output.state, {**output.model_state, **teacher}
    if isinstance(inputs.carry, DistillationCarry):
        frozen = jax.lax.stop_gradient(teacher[TEACHER])
        caches = inputs.carry.teacher
        read = predict(teacher_config(config), Variables(frozen, {}), caches, batch)
        divergence = summed_divergence(
            output.hidden, read.hidden, batch.scored,
            output_weights(config.model, params), output_weights(config.model, frozen),
            scale=logit_scale(config.model), soft_cap=config.model.embedding.soft_cap,
            chunk=training.loss_chunk,
        )  # fmt: skip
        total += config.distillation.weight * divergence
        losses["loss/divergence"] = divergence / jnp.maximum(count, 1.0)
        state = DistillationCarry(state, read.state)
    return total, Aux(nats, count, state, after, {**output.metrics, **losses})
