"""A run made of its config: corpus, devices, optimizer, shapes. Nothing is trained here."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import optax

from brt.config import Config
from brt.data import preparation
from brt.training import compilation, reading, starting
from brt.training import optimizer as optimizers
from brt.training.corpora import AnyCorpus
from brt.training.reading import AnyReader
from brt.training.sharding import by_lane, make_mesh, replicated, state_shardings
from brt.training.state import TrainState, initial_state, parameter_axes
from brt.training.step import StepMetrics, train_step
from brt.types import AnyBatch


class Run(NamedTuple):
    """What training and a dry run need.

    Attributes:
      config: with what depends on data and machine written out.
      abstract: shapes, dtypes and shardings of the train state.
    """

    config: Config
    corpus: AnyCorpus
    reader: AnyReader
    mesh: jax.sharding.Mesh
    optimizer: optax.GradientTransformation
    abstract: TrainState


def build(config: Config, *, progress: bool = True) -> Run:
    """Prepares the data and shapes everything."""
    compilation.use_cache(preparation.cache_directory(config.data))
    mesh = make_mesh(config.mesh)
    config, corpus, reader = reading.prepare(config, progress=progress)
    optimizer = optimizers.build(config.optimizer, config.training.steps, parameter_axes(config))
    shapes = jax.eval_shape(partial(initial_state, config, optimizer))
    shardings = state_shardings(mesh, shapes)
    abstract = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings,
    )
    return Run(config, corpus, reader, mesh, optimizer, abstract)


def new_state(run: Run, say: Callable[[str], object] = print) -> TrainState:
    """The state at step 0, made on the devices where it belongs.

    Args:
      say: told what the weights of Training.init_from lack, where they lack something.

    Raises:
      CheckpointError: the weights of Training.init_from cannot be read, or do not fit.
    """
    shardings = jax.tree.map(lambda leaf: leaf.sharding, run.abstract)
    init = partial(initial_state, run.config, run.optimizer)
    state = jax.jit(init, out_shardings=shardings)(_key(run))
    where = run.config.training.init_from
    if not where:
        return state
    params, new, unread = starting.params(run.config, state.params)
    if new:
        say(f"new, as {where} lacks them: {', '.join(new)}")
    if unread:
        say(f"of {where} this model has no place for: {', '.join(unread)}")
    return state._replace(params=jax.device_put(params, shardings.params))


def put(run: Run, batch: AnyBatch) -> AnyBatch:
    """A host batch on the devices, by lanes."""
    return jax.device_put(batch, by_lane(run.mesh))


class CompiledStep:
    """The train step, compiled once for each shape of batch; it takes the state's memory over."""

    def __init__(self, run: Run):
        shardings = jax.tree.map(lambda leaf: leaf.sharding, run.abstract)
        metrics = StepMetrics(*[replicated(run.mesh)] * len(StepMetrics._fields))
        step = partial(train_step, config=run.config, optimizer=run.optimizer)
        self._jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, metrics))
        self._key = jax.device_put(_key(run), replicated(run.mesh))
        self._run = run
        self._compiled: dict[tuple, Any] = {}

    def prepare(self, batch: AnyBatch) -> None:
        """Compiles for batches of this shape, if that was not done yet."""
        if (shape := _shape(batch)) not in self._compiled:
            lanes = by_lane(self._run.mesh)
            abstract = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=lanes), batch
            )
            lowered = self._jitted.lower(self._run.abstract, abstract, self._key)
            self._compiled[shape] = lowered.compile()

    def prepared(self, batch: AnyBatch) -> bool:
        """Whether `prepare` has nothing to do."""
        return _shape(batch) in self._compiled

    def __call__(self, state: TrainState, batch: AnyBatch) -> tuple[TrainState, StepMetrics]:
        self.prepare(batch)
        return self._compiled[_shape(batch)](state, batch, self._key)


def compiled_step(run: Run) -> CompiledStep:
    """The train step, compiled for the largest batch."""
    step = CompiledStep(run)
    step.prepare(reading.largest_batch(run.reader))
    return step


def _shape(batch: AnyBatch) -> tuple[tuple[int, ...], ...]:
    return tuple(x.shape for x in batch)


def _key(run: Run) -> jax.Array:
    """Of the run's seed; an argument of what is compiled, so that seeds share programs."""
    return jax.random.key(run.config.training.seed)
