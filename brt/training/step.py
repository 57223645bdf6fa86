"""One training step: pure, of a state and a batch."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from brt.config import Config
from brt.training import objectives
from brt.training.state import TrainState
from brt.types import AnyBatch

# Purposes that randomness is folded with; numbers are part of a run's identity.
DROPOUT = 1


class StepMetrics(NamedTuple):
    """Float32 scalars of one step.

    Attributes:
      nats: summed over the scored tokens.
      tokens: how many were scored.
      gradient_norm: of the mean loss, before any clipping.
    """

    nats: Float[Array, ""]
    tokens: Float[Array, ""]
    gradient_norm: Float[Array, ""]


def _accumulated(
    params: PyTree[Array],
    carried: PyTree[Array],
    batch: AnyBatch,
    key: Array,
    config: Config,
) -> tuple[Float[Array, ""], PyTree[Array], PyTree[Array]]:
    """Nats, next state and gradients, from parts of the lanes one after another."""
    parts = config.training.gradient_accumulation
    value_and_grad = jax.value_and_grad(objectives.of(config).loss, has_aux=True)
    if parts == 1:
        (_, (nats, carried)), gradients = value_and_grad(params, carried, batch, key, config)
        return nats, carried, gradients

    def cut(x: Array) -> Array:  # part i takes lanes i::parts, so every device has its share
        return jnp.moveaxis(x.reshape(-1, parts, *x.shape[1:]), 1, 0)

    def body(sums: tuple, part: tuple) -> tuple[tuple, PyTree[Array]]:
        index, state, piece = part
        part_key = jax.random.fold_in(key, index)
        (_, (nats, state)), gradients = value_and_grad(params, state, piece, part_key, config)
        return jax.tree.map(jnp.add, sums, (nats, gradients)), state

    zeros = (jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, params))
    pieces = (jnp.arange(parts), jax.tree.map(cut, carried), jax.tree.map(cut, batch))
    (nats, gradients), after = jax.lax.scan(body, zeros, pieces)
    joined = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[2:]), after)
    return nats, joined, gradients


def train_step(
    state: TrainState,
    batch: AnyBatch,
    key: Array,
    *,
    config: Config,
    optimizer: optax.GradientTransformation,
) -> tuple[TrainState, StepMetrics]:
    """Reads one segment of every lane, or a batch of pairs, and updates the parameters.

    The loss is the mean over the scored tokens of the whole batch. Gradients end where the
    carried state comes in. `key` is that of the run's seed at every step; as an argument it
    leaves runs that differ in nothing else with the same program, compiled once.
    """
    key = jax.random.fold_in(jax.random.fold_in(key, DROPOUT), state.step)
    carried = objectives.of(config).cut_gradient(state.carried)
    nats, carried, gradients = _accumulated(state.params, carried, batch, key, config)
    tokens = objectives.of(config).scored(batch, config).astype(jnp.float32)
    gradients = jax.tree.map(lambda g: g / jnp.maximum(tokens, 1.0), gradients)
    updates, after = optimizer.update(gradients, state.optimizer, state.params)
    params = optax.apply_updates(state.params, updates)
    metrics = StepMetrics(nats, tokens, optax.tree.norm(gradients))
    return TrainState(state.step + 1, params, after, carried), metrics
