"""The training step, a pure function of the train state and a batch.

Metrics of steps are accumulated one step late, so that the device never waits for the host.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, PyTree

from brt import tasks
from brt.config import Config
from brt.distributed import rules
from brt.errors import ConfigError
from brt.tasks.interface import Aux, LossInputs
from brt.training import layer_forms, replicas, trainable
from brt.training.bad_steps import BadStep, RecentLosses
from brt.training.layerwise import Stepper
from brt.training.state import TrainState, merged_params, parameter_axes

# The random key of dropout is the run's key with this number folded in (`jax.random.fold_in`).
# Another number would change the results of every run.
DROPOUT = 1


class StepMetrics(NamedTuple):
    """Metrics of one training step, as float32 scalars."""

    nats: Float[Array, ""]  # cross-entropy, summed over the scored tokens
    tokens: Float[Array, ""]  # number of scored tokens (targets that are not padding)
    gradient_norm: Float[Array, ""]  # norm of the mean loss's gradients, before clipping
    others: dict[str, Float[Array, ""]]  # further metrics of the task, by name
    # 1 if the step left the state unchanged, otherwise 0; None if steps are never skipped.
    skipped: Float[Array, ""] | None = None


def _loss_and_gradients(
    params: PyTree[Array], inputs: LossInputs, config: Config
) -> tuple[Aux, PyTree[Array]]:
    """Computes the loss and the gradients of trained parameters, summed over microbatches."""
    loss = tasks.from_config(config).loss
    trained, frozen = trainable.split(params, trainable.patterns(config))

    def microbatch_gradients(inputs: LossInputs) -> tuple[Aux, PyTree[Array]]:
        def summed_loss(trained: PyTree[Array]) -> tuple[Float[Array, ""], Aux]:
            params = layer_forms.stacked(trainable.merge(trained, frozen))
            return loss(config, merged_params(config, params), inputs)

        (_, aux), gradients = jax.value_and_grad(summed_loss, has_aux=True)(trained)
        return aux, gradients

    count = config.training.gradient_accumulation
    if count == 1:
        return microbatch_gradients(inputs)

    # A group is the devices at one index along `Mesh.data` (see `replicas`). Each group adds up its
    # own gradients. Otherwise XLA would add up the gradients of all groups, which may be in
    # different slices, after each microbatch. Models with a model state do without groups, because
    # the model state is learned from all rows at once.
    groups = 1 if jax.tree.leaves(inputs.model_state) else replicas.groups()
    group_gradients: Callable[..., Any] = microbatch_gradients
    if groups > 1:
        in_axes = LossInputs(batch=0, key=None, carry=0, model_state=None)
        group_gradients = replicas.in_groups(microbatch_gradients, (in_axes,))

    def split(x: Array) -> Array:
        # The shape [rows, ...] becomes [microbatches, rows of a microbatch, ...] or, with groups,
        # [microbatches, groups, rows, ...]. Microbatch i consists of the rows i, i + count, ... The
        # rows of a device are adjacent, so every device has rows of each microbatch.
        parts = jnp.moveaxis(x.reshape(-1, count, *x.shape[1:]), 1, 0)
        return parts.reshape(count, groups, -1, *x.shape[1:]) if groups > 1 else parts

    def joined(x: Array) -> Array:
        if groups > 1:
            x = x.reshape(count, -1, *x.shape[3:])
        return jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[2:])

    # The function is the body of the scan over microbatches. It adds nats, tokens and gradients.
    def add_microbatch(sums: tuple, microbatch: tuple) -> tuple[tuple, tuple]:
        (model_state, *totals), (index, carry, part) = sums, microbatch
        part_key = jax.random.fold_in(inputs.key, index)
        aux, gradients = group_gradients(LossInputs(part, part_key, carry, model_state))
        totals = jax.tree.map(jnp.add, tuple(totals), (aux.nats, aux.count, gradients))
        return (aux.model_state, *totals), (aux.carry, aux.metrics)

    zeros_like = replicas.zeros_in_groups if groups > 1 else jnp.zeros_like
    zero = zeros_like(jnp.zeros((), jnp.float32))
    sums = inputs.model_state, zero, zero, jax.tree.map(zeros_like, trained)
    parts = jnp.arange(count), jax.tree.map(split, inputs.carry), jax.tree.map(split, inputs.batch)
    (model_state, nats, tokens, gradients), (carries, metrics) = jax.lax.scan(
        add_microbatch, sums, parts
    )
    if groups > 1:
        totals = nats, tokens, gradients
        nats, tokens, gradients = jax.tree.map(lambda x: jnp.sum(x, axis=0), totals)
    carry = jax.tree.map(joined, carries)
    return Aux(nats, tokens, carry, model_state, jax.tree.map(jnp.mean, metrics)), gradients


def _over_replicas(
    params: PyTree[Array],
    inputs: LossInputs,
    config: Config,
    optimizer_shards: PyTree[PartitionSpec] | None,
) -> tuple[Aux, PyTree[Array]]:
    """Computes the loss and its gradients over the rows of all replicas.

    If the model has a model state, the SPMD partitioner distributes the computation, because the
    model state is learned from all rows at once. `optimizer_shards` are the specs by which the
    gradients are sharded over replicas; None if all replicas need all gradients.
    """
    if replicas.count() == 1 or jax.tree.leaves(inputs.model_state):
        if replicas.count() > 1 and config.mesh.gradient_dtype != "float32":
            raise ConfigError(
                f"Mesh.gradient_dtype = {config.mesh.gradient_dtype!r} needs a model that learns "
                "nothing without gradients; leave it out"
            )
        if optimizer_shards is not None:
            # The parameters are gathered, because each replica may hold only a shard of them.
            params = rules.replicated(params)
        return _loss_and_gradients(params, inputs, config)

    # A replica has its own rows of the batch, and returns their new carry. All other results are
    # sums over the replicas or, for metrics, means.
    def summed_gradients(
        params: PyTree[Array], carry: PyTree[Array], batch: Any, key: Array
    ) -> tuple:
        own = inputs._replace(batch=batch, key=key, carry=carry)
        aux, gradients = _loss_and_gradients(params, own, config)
        sums = aux.nats, aux.count, aux.metrics
        rounded = jax.tree.map(lambda x: x.astype(config.mesh.gradient_dtype), gradients)
        if optimizer_shards is None:
            *sums, total = replicas.psum((*sums, rounded))
        else:
            sums, total = replicas.psum(sums), replicas.psum(rounded, optimizer_shards)
        gradients = jax.tree.map(lambda x, own: x.astype(own.dtype), total, gradients)
        nats, count, metrics = sums
        means = jax.tree.map(lambda x: x / replicas.count(), metrics)
        return (nats, count, means, gradients), aux.carry

    replicated = PartitionSpec()
    lanes = replicas.lane_specs(inputs.carry, tasks.from_config(config).carry_axes(config))
    (nats, count, metrics, gradients), carry = replicas.shard_map(
        summed_gradients,
        (replicated, lanes, replicas.LANES, replicated),
        ((replicated, replicated, replicated, optimizer_shards or replicated), lanes),
    )(params, inputs.carry, inputs.batch, inputs.key)
    return Aux(nats, count, carry, inputs.model_state, metrics), gradients


def train_step(
    state: TrainState,
    batch: Any,
    key: Array,
    limit: Float[Array, ""] | None = None,
    *,
    config: Config,
    optimizer: Stepper,
) -> tuple[TrainState, StepMetrics]:
    """Computes one training step: loss, gradients, and the update of the train state.

    The loss is the mean over all scored tokens of the batch. Every row of the batch is one segment
    or, in tasks without segments, one example. This function is the only place where gradients are
    stopped at the carry, so that they do not flow into the previous segment.

    Args:
      state: the train state before the step, in either form of `brt.training.layer_forms`. The
        returned state has the same form.
      key: random key of Training.seed, the same at every step. The key is an argument, so that runs
        with different seeds share one compiled program.
      limit: the loss, in nats per token, above which the step leaves the train state unchanged if
        Training.on_bad_step is "skip"; None for no limit.
    """
    key = jax.random.fold_in(jax.random.fold_in(key, DROPOUT), state.step)
    carry, optimizer_shards = jax.lax.stop_gradient(state.carry), None
    inputs = LossInputs(batch, key, carry, state.model_state)
    params, frozen = trainable.split(state.params, trainable.patterns(config))
    if replicas.shards_optimizer(config.optimizer):
        optimizer_shards = replicas.optimizer_shards(params, parameter_axes(config))
    aux, gradients = _over_replicas(state.params, inputs, config, optimizer_shards)
    with jax.named_scope("optimizer"):
        if optimizer_shards is not None:
            params, gradients = replicas.constrain(
                (params, gradients), (optimizer_shards, optimizer_shards)
            )
        moments = state.optimizer
        if config.optimizer.offload:
            moments = jax.device_put(moments, jax.memory.Space.Device)
        params, after, norm = optimizer.step(
            gradients, moments, params, jnp.maximum(aux.count, 1.0)
        )
        skip = config.training.on_bad_step == "skip"
        if config.optimizer.offload and not skip:
            after = jax.device_put(after, jax.memory.Space.Host)
        if optimizer_shards is not None:
            # Each replica computes the updates of its shard. The output sharding of the step then
            # gathers the parameters.
            params = replicas.constrain(params, optimizer_shards)
    metrics = StepMetrics(aux.nats, aux.count, norm, aux.metrics)
    model_state = tasks.from_config(config).update_model_state(config, aux.model_state)
    params = trainable.merge(params, frozen)
    new = TrainState(state.step + 1, params, after, aux.carry, model_state)
    if skip:
        new, metrics = _unless_bad(state._replace(optimizer=moments), new, metrics, limit)
        if config.optimizer.offload:
            after = jax.device_put(new.optimizer, jax.memory.Space.Host)
            new = new._replace(optimizer=after)
    return new, metrics


def _unless_bad(
    before: TrainState, new: TrainState, metrics: StepMetrics, limit: Array | None
) -> tuple[TrainState, StepMetrics]:
    """Returns the train state and the metrics after a step, which is skipped if it is bad.

    A step is bad if its loss, gradients or new state are not finite, or its loss exceeds `limit`.
    The returned state is `new`, or `before` with the new number of the step if the step is bad.
    """
    floats = [x for x in jax.tree.leaves(new) if jnp.issubdtype(x.dtype, jnp.inexact)]
    finite = [jnp.isfinite(x).all() for x in (metrics.nats, metrics.gradient_norm, *floats)]
    good = jnp.stack(finite).all()
    if limit is not None:
        good &= metrics.nats / jnp.maximum(metrics.tokens, 1.0) <= limit
    chosen = jax.tree.map(lambda old, new: jnp.where(good, new, old), before, new)
    chosen = chosen._replace(step=new.step)
    return chosen, metrics._replace(skipped=1.0 - good.astype(jnp.float32))


_REMEDY = (
    "lower Optimizer.learning_rate or lengthen Optimizer.warmup_steps, and run again to go on from "
    "the newest checkpoint, or set Optimizer.clip_norm in a new run"
)


class MetricAccumulator:
    """Totals of the metrics since the last report, and of the tokens since step 0.

    The totals are saved in checkpoints, so that a resumed run reports the same numbers. `saved` has
    the totals of a checkpoint; None at step 0. `spike_factor` is Training.spike_factor. For every
    step that left the train state unchanged, `on_skip` is called with its number and the reason.
    """

    def __init__(
        self,
        saved: dict[str, Any] | None = None,
        *,
        spike_factor: float = 0.0,
        on_skip: Callable[[int, str], object] = lambda step, reason: None,
    ):
        self._factor, self._on_skip = spike_factor, on_skip
        self.restore(saved)

    def restore(self, saved: dict[str, Any] | None) -> None:
        """Sets all totals to `saved` (None: to 0), and drops metrics that are not yet added."""
        saved = saved or {}
        # Scored tokens (targets that are not padding) since step 0, without skipped steps.
        self.tokens_seen: int = saved.get("tokens_seen", 0)
        self.skipped: int = saved.get("skipped", 0)  # number of skipped steps since step 0
        self._recent = RecentLosses(self._factor, saved.get("usual", ()))
        self._pending: tuple[int, StepMetrics] | None = None
        self._restart(saved)

    def limit(self, step: int) -> float:
        return self._recent.limit(step)

    def add(self, step: int, metrics: StepMetrics) -> None:
        """Adds the metrics of the previous step to the totals, and stores those of this step.

        The metrics of this step are not read, so that the host need not wait for the step. If the
        previous step was bad, BadStep is raised (see `flush`).
        """
        self.flush()
        self._pending = step, metrics

    def flush(self) -> None:
        """Waits for the step that `add` stored, and adds the step's metrics to the totals.

        BadStep is raised if the step's loss or gradients were not finite, or if its loss exceeded
        the limit. If Training.on_bad_step is "skip", `on_skip` is called instead.
        """
        if self._pending is None:
            return
        (step, metrics), self._pending = self._pending, None
        *sums, others, skipped = jax.device_get(metrics)
        nats, tokens, norm = map(float, sums)
        if skipped:
            self.skipped += 1
            self._on_skip(
                step, self._problem(step, nats, tokens, norm) or "the update is not finite"
            )
            return
        if skipped is None and (reason := self._problem(step, nats, tokens, norm)):
            raise BadStep(step, reason, _REMEDY)
        if tokens:  # A step that reads only prompts has no scored tokens.
            self._recent.add(step, nats / tokens)
        self._nats += nats
        self._tokens += tokens
        self._norms += norm
        self._others.update({name: float(value) for name, value in others.items()})
        self._steps += 1
        self.tokens_seen += int(tokens)

    def _problem(self, step: int, nats: float, tokens: float, norm: float) -> str:
        """Returns a phrase about what is wrong with a step; "" if nothing is."""
        if not (math.isfinite(nats) and math.isfinite(norm)):
            return f"the loss ({nats} nats) or the gradient norm ({norm}) is not finite"
        loss, limit = nats / max(tokens, 1.0), self.limit(step)
        if loss <= limit:
            return ""
        return (
            f"the loss ({loss:.4g}) is above {limit:.4g}, Training.spike_factor = {self._factor} "
            "times the median of recent losses"
        )

    def bits_per_token(self) -> float:
        self.flush()
        return self._nats / max(self._tokens, 1.0) / math.log(2)

    def report(self) -> dict[str, float]:
        """Returns the averages of the metrics since the last call, and resets the totals.

        The keys are tags. The tag "data/tokens" has the number of scored tokens since step 0.
        """
        tokens = max(self._tokens, 1.0)
        values = {
            "train/loss": self._nats / tokens,
            "train/bits_per_token": self._nats / tokens / math.log(2),
            "train/gradient_norm": self._norms / max(self._steps, 1),
            "data/tokens": self.tokens_seen,
            **{f"train/{name}": x / max(self._steps, 1) for name, x in self._others.items()},
        }
        self._restart()
        return values

    def _restart(self, saved: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Sets the totals since the last report to `saved`; totals that `saved` lacks become 0."""
        self._nats, self._tokens, self._norms = (
            saved.get(name, 0.0) for name in ("nats", "tokens", "norms")
        )
        self._steps: int = saved.get("steps", 0)
        self._others: Counter[str] = Counter(saved.get("others", {}))

    def state(self) -> dict[str, Any]:
        """Returns the totals as JSON, for a checkpoint; `flush` has to be called first."""
        return {
            "tokens_seen": self.tokens_seen,
            "nats": self._nats,
            "tokens": self._tokens,
            "norms": self._norms,
            "steps": self._steps,
            "others": dict(self._others),
            "skipped": self.skipped,
            "usual": self._recent.state(),
        }
