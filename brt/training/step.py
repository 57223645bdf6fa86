"""One training step: pure, of a state and a batch."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, PyTree

from brt import tasks
from brt.config import Config
from brt.tasks.protocol import Aux
from brt.training import replicas
from brt.training.state import TrainState, parameter_axes

# Purposes that randomness is folded with; numbers are part of a run's identity.
DROPOUT = 1


class StepMetrics(NamedTuple):
    """Float32 scalars of one step.

    Attributes:
      nats: summed over the scored tokens.
      tokens: how many were scored.
      gradient_norm: of the mean loss, before any clipping.
      others: what the task has to log besides, by name.
      skipped: 1 where the step changed nothing, else 0; None where it always does.
    """

    nats: Float[Array, ""]
    tokens: Float[Array, ""]
    gradient_norm: Float[Array, ""]
    others: dict[str, Float[Array, ""]]
    skipped: Float[Array, ""] | None = None


def _accumulated(
    state: TrainState, carry: PyTree[Array], batch: Any, key: Array, config: Config
) -> tuple[Aux, PyTree[Array]]:
    """What the loss gives and its gradients, from microbatches of the lanes one after another."""
    loss = tasks.of(config).loss

    def of_microbatch(
        carry: PyTree[Array], model_state: PyTree[Array], batch: Any, key: Array
    ) -> tuple[Aux, PyTree[Array]]:
        def of_params(params: PyTree[Array]) -> tuple[Float[Array, ""], Aux]:
            return loss(config, params, carry, model_state, batch, key)

        (_, aux), gradients = jax.value_and_grad(of_params, has_aux=True)(state.params)
        return aux, gradients

    count = config.training.gradient_accumulation
    if count == 1:
        return of_microbatch(carry, state.model_state, batch, key)

    def cut(x: Array) -> Array:  # microbatch i takes lanes i::count: every device has its share
        return jnp.moveaxis(x.reshape(-1, count, *x.shape[1:]), 1, 0)

    def body(sums: tuple, microbatch: tuple) -> tuple[tuple, tuple]:
        (model_state, *totals), (index, carry, piece) = sums, microbatch
        own = jax.random.fold_in(key, index)
        aux, gradients = of_microbatch(carry, model_state, piece, own)
        totals = jax.tree.map(jnp.add, tuple(totals), (aux.nats, aux.count, gradients))
        return (aux.model_state, *totals), (aux.carry, aux.metrics)

    zero = jnp.zeros((), jnp.float32)
    sums = state.model_state, zero, zero, jax.tree.map(jnp.zeros_like, state.params)
    pieces = jnp.arange(count), jax.tree.map(cut, carry), jax.tree.map(cut, batch)
    (model_state, nats, tokens, gradients), (after, metrics) = jax.lax.scan(body, sums, pieces)
    joined = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[2:]), after)
    return Aux(nats, tokens, joined, model_state, jax.tree.map(jnp.mean, metrics)), gradients


def _of_all_lanes(
    state: TrainState,
    carry: PyTree[Array],
    batch: Any,
    key: Array,
    config: Config,
    optimizer_shards: PyTree[PartitionSpec] | None,
) -> tuple[Aux, PyTree[Array]]:
    """As `_accumulated`, of the lanes of all replicas, each with its share of the gradients; what
    is learned without gradients may depend on all of them at once, and leaves it to the compiler.
    """
    if replicas.number() == 1 or jax.tree.leaves(state.model_state):
        return _accumulated(state, carry, batch, key, config)

    def own(params: PyTree[Array], carry: PyTree[Array], batch: Any, key: Array) -> tuple:
        aux, gradients = _accumulated(state._replace(params=params), carry, batch, key, config)
        sums = aux.nats, aux.count, aux.metrics
        if optimizer_shards is None:
            *sums, gradients = replicas.summed((*sums, gradients))
        else:
            sums, gradients = replicas.summed(sums), replicas.summed(gradients, optimizer_shards)
        nats, count, metrics = sums
        means = jax.tree.map(lambda x: x / replicas.number(), metrics)
        return (nats, count, means, gradients), aux.carry

    whole, lanes = PartitionSpec(), replicas.lanes_of(carry, tasks.of(config).carry_axes(config))
    (nats, count, metrics, gradients), carry = replicas.each(
        own,
        (whole, lanes, replicas.LANES, whole),
        ((whole, whole, whole, optimizer_shards or whole), lanes),
    )(state.params, carry, batch, key)
    return Aux(nats, count, carry, state.model_state, metrics), gradients


def train_step(
    state: TrainState,
    batch: Any,
    key: Array,
    limit: Float[Array, ""] | None = None,
    *,
    config: Config,
    optimizer: optax.GradientTransformation,
) -> tuple[TrainState, StepMetrics]:
    """Reads one segment of every lane, or a batch of rows, and updates the parameters.

    The loss is the mean over what is scored of the whole batch. Gradients end where the carry
    comes in, here and nowhere else. `key` is that of the run's seed at every step; as an argument
    it leaves runs that differ in nothing else with the same program, compiled once.

    Args:
      limit: of the loss, above which a step is skipped where Training.on_bad_step says so.
    """
    key = jax.random.fold_in(jax.random.fold_in(key, DROPOUT), state.step)
    carry, params, optimizer_shards = jax.lax.stop_gradient(state.carry), state.params, None
    if replicas.share_state(config.optimizer):
        optimizer_shards = replicas.optimizer_shards(params, parameter_axes(config))
    aux, gradients = _of_all_lanes(state, carry, batch, key, config, optimizer_shards)
    with jax.named_scope("optimizer"):
        if optimizer_shards is not None:
            params, gradients = (replicas.shared(x, optimizer_shards) for x in (params, gradients))
        gradients = jax.tree.map(lambda g: g / jnp.maximum(aux.count, 1.0), gradients)
        moments = state.optimizer
        if config.optimizer.offload:
            moments = jax.device_put(moments, jax.memory.Space.Device)
        updates, after = optimizer.update(gradients, moments, params)
        skip = config.training.on_bad_step == "skip"
        if config.optimizer.offload and not skip:
            after = jax.device_put(after, jax.memory.Space.Host)
        params = optax.apply_updates(params, updates)
        if optimizer_shards is not None:
            params = replicas.shared(
                params, optimizer_shards
            )  # and then gathered, as they lie in the state
    metrics = StepMetrics(aux.nats, aux.count, optax.tree.norm(gradients), aux.metrics)
    learnt = tasks.of(config).settled(config, aux.model_state)
    new = TrainState(state.step + 1, params, after, aux.carry, learnt)
    if skip:
        new, metrics = _unless_bad(state._replace(optimizer=moments), new, metrics, limit)
        if config.optimizer.offload:
            after = jax.device_put(new.optimizer, jax.memory.Space.Host)
            new = new._replace(optimizer=after)
    return new, metrics


def _unless_bad(
    before: TrainState, new: TrainState, metrics: StepMetrics, limit: Array | None
) -> tuple[TrainState, StepMetrics]:
    """The state before, but for the step, where loss, gradients or the new state are not finite."""
    found = [x for x in jax.tree.leaves(new) if jnp.issubdtype(x.dtype, jnp.inexact)]
    finite = [jnp.isfinite(x).all() for x in (metrics.nats, metrics.gradient_norm, *found)]
    good = jnp.stack(finite).all()
    if limit is not None:
        good &= metrics.nats / jnp.maximum(metrics.tokens, 1.0) <= limit
    kept = jax.tree.map(lambda old, new: jnp.where(good, new, old), before, new)
    kept = kept._replace(step=new.step)
    return kept, metrics._replace(skipped=1.0 - good.astype(jnp.float32))
