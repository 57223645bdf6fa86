"""A run made of its config: corpus, devices, optimizer, shapes. Nothing is trained here."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from brt import tasks, tree_utils
from brt.checkpointing.reader import VerifiedCheckpoint, join
from brt.config import Config
from brt.config_io import config_from_json
from brt.data.readers import Reader
from brt.distributed import mesh as meshes
from brt.distributed import processes
from brt.distributed.mesh import by_lane, replicated
from brt.errors import NonFiniteError
from brt.tasks import resolving
from brt.tasks.protocol import Dataset, Task
from brt.tasks.weights import Weights
from brt.training import compilation, replicas
from brt.training import optimizer as optimizers
from brt.training.sharding import state_shardings
from brt.training.start import warm_start
from brt.training.state import TrainState, initial_state, parameter_axes
from brt.training.step import StepMetrics, train_step


class Shapes(NamedTuple):
    """What a config says of a run without its data.

    Attributes:
      abstract: shapes, dtypes and shardings of the train state.
    """

    mesh: jax.sharding.Mesh
    optimizer: optax.GradientTransformation
    abstract: TrainState


class Run(NamedTuple):
    """What training needs.

    Attributes:
      config: with what depends on data and machine written out.
      weights: that it starts from, if from any.
      mesh, optimizer, abstract: its `Shapes`.
    """

    config: Config
    task: Task
    dataset: Dataset
    reader: Reader
    weights: Weights | None
    mesh: jax.sharding.Mesh
    optimizer: optax.GradientTransformation
    abstract: TrainState


def build(
    config: Config, *, checkpoint: VerifiedCheckpoint | None = None, progress: bool = True
) -> Run:
    """Prepares the data and shapes everything.

    Args:
      checkpoint: the one that the run resumes from. It knows the model of Training.init_from,
        even if those weights have been removed since.
      progress: whether to report how far the preparation of the data is.

    Raises:
      ConfigError: settings that do not fit each other, the data or the weights.
      CheckpointError: Training.init_from names no weights of such a model.
      DataError: the data cannot be read as asked.
    """
    compilation.use_cache()
    weights = _weights(config, checkpoint)
    config, dataset, reader = prepare(config, weights, progress=progress)
    return Run(config, tasks.of(config), dataset, reader, weights, *shaped(config))


def without_data(config: Config) -> Shapes | None:
    """Those of a run to look at, not to train; None where they depend on the data."""
    task = tasks.of(config)
    if config.training.init_from or not task.knows_sizes(config):
        return None
    tasks.check(config)
    return shaped(config)


def shaped(config: Config, devices: Sequence[jax.Device] | None = None) -> Shapes:
    """Shapes of a config in which all sizes are written out.

    Args:
      devices: of its mesh, which need not be here; None: this machine's.
    """
    mesh = meshes.build(config.mesh, tasks.of(config).shared(config), devices)
    axes = parameter_axes(config)
    optimizer = optimizers.build(config.optimizer, config.training.steps, axes)
    shapes = jax.eval_shape(partial(initial_state, config, optimizer))
    abstract = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        state_shardings(mesh, config, shapes, axes),
    )
    return Shapes(mesh, optimizer, abstract)


def prepare(
    config: Config, weights: Weights | None = None, *, progress: bool = True
) -> tuple[Config, Dataset, Reader]:
    """The config with all written out, its data and their batches; raises as `build`."""
    task = tasks.of(config)
    if weights:
        config = warm_start.with_model(config, weights)
    tasks.check(config)
    dataset = task.open(config, progress=progress)
    if weights:
        config = task.with_weights(config, weights, dataset.tokenizer)
    config = task.resolve(config, dataset)
    reader = task.reader(config, dataset)
    return resolving.with_steps(config, reader.steps_per_epoch), dataset, reader


def _weights(config: Config, checkpoint: VerifiedCheckpoint | None) -> Weights | None:
    if not (config.training.init_from and checkpoint):
        return warm_start.find_weights(config)
    source, where = config_from_json(checkpoint.meta["config"]), config.training.init_from
    return warm_start.weights_of_run(where, config, source, checkpoint.meta["tokenizer"])


def new_state(run: Run, say: Callable[[str], object] = print) -> TrainState:
    """The state at step 0, made on the devices where it belongs.

    Args:
      say: told what the weights of Training.init_from lack, where they lack something.

    Raises:
      CheckpointError: the weights of Training.init_from cannot be read, or do not fit.
      NonFiniteError: they hold NaN or infinity.
    """
    shardings = jax.tree.map(lambda leaf: leaf.sharding, run.abstract)
    init = partial(initial_state, run.config, run.optimizer)
    with meshes.use(run.mesh):
        begin = jax.jit(init, out_shardings=shardings, compiler_options=dict(compilation.options()))
        state = begin(_key(run))
    if not run.weights:
        return state
    where = run.weights.where
    params, new, unread = run.task.start(run.config, run.weights, state.params)
    if new:
        say(f"new, as {where} lacks them: {', '.join(new)}")
    if unread:
        say(f"of {where} this model has no place for: {', '.join(unread)}")
    if bad := tree_utils.not_finite(tree_utils.named(params)):
        raise NonFiniteError(
            f"the weights of {where} hold NaN or infinity in {join(bad)}; start from others"
        )
    learnt = run.task.start_model_state(run.config, run.weights, state.model_state)
    return state._replace(
        params=jax.device_put(params, shardings.params),
        model_state=jax.device_put(learnt, shardings.model_state),
    )


def own_reader(run: Run) -> Reader:
    """The run's, of the lanes that this process's devices have."""
    if not processes.several():
        return run.reader
    lanes = meshes.own_lanes(run.mesh, run.config.training.batch_size)
    return dataclasses.replace(run.reader, lanes=lanes)


def put(run: Run, batch: Any) -> Any:
    """A host batch of `own_reader` on the devices, by lanes."""
    if not processes.several():
        return jax.device_put(batch, by_lane(run.mesh))
    lanes = run.config.training.batch_size
    own = meshes.own_lanes(run.mesh, lanes)
    return jax.tree.map(lambda x: meshes.global_array(run.mesh, x, own, lanes), batch)


def put_scalar(run: Run, value: np.generic) -> jax.Array:
    """A number that all processes have, on the devices."""
    return jax.make_array_from_callback((), replicated(run.mesh), lambda _: np.asarray(value))


def lowered_step(config: Config, shapes: Shapes, batch: Any) -> jax.stages.Lowered:
    """The train step for batches like this one, of all lanes or of some, ready to be compiled: of
    `step_inputs`, a batch and the key."""
    mesh, lanes = shapes.mesh, by_lane(shapes.mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, shapes.abstract)

    def step(params: Any, others: TrainState, *given: Any) -> tuple[TrainState, StepMetrics]:
        state = others._replace(params=params)
        return train_step(state, *given, config=config, optimizer=shapes.optimizer)

    # What replicas gather is made elsewhere: in the parameters' own place it would be copied there.
    donated = (1,) if replicas.share_state(config.optimizer, mesh) else (0, 1)
    # One sharding stands for all that there is in the metrics.
    jitted = jax.jit(step, donate_argnums=donated, out_shardings=(shardings, replicated(mesh)))

    def of_all_lanes(x: Any) -> jax.ShapeDtypeStruct:
        shape = (config.training.batch_size, *x.shape[1:])
        # A host's int64 arrives on devices as int32: a sum that somebody's own task made in NumPy.
        return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(x.dtype), sharding=lanes)

    key = jax.eval_shape(lambda: jax.random.key(0))
    key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=replicated(mesh))
    limit = jax.ShapeDtypeStruct((), np.float32, sharding=replicated(mesh))
    limits = (limit,) if skips_spikes(config) else ()
    with meshes.use(mesh):
        inputs = step_inputs(shapes.abstract)
        return jitted.lower(*inputs, jax.tree.map(of_all_lanes, batch), key, *limits)


def step_inputs(state: TrainState) -> tuple[Any, TrainState]:
    """The parameters, and the others: a step may take over the memory of these alone."""
    return state.params, state._replace(params=None)


def skips_spikes(config: Config) -> bool:
    """Whether the step is told above which loss it changes nothing."""
    return config.training.on_bad_step == "skip" and bool(config.training.spike_factor)


class CompiledStep:
    """The train step, compiled once for each shape of batch; it takes the state's memory over."""

    def __init__(self, run: Run):
        self._key = jax.jit(lambda: _key(run), out_shardings=replicated(run.mesh))()
        self._run = run
        self._limited = skips_spikes(run.config)
        self._compiled: dict[tuple, Any] = {}

    def prepare(self, batch: Any) -> None:
        """Compiles for batches of this shape, if that was not done yet."""
        if (shape := _shape(batch)) not in self._compiled:
            shapes = Shapes(self._run.mesh, self._run.optimizer, self._run.abstract)
            lowered = lowered_step(self._run.config, shapes, batch)
            self._compiled[shape] = lowered.compile(compilation.options())
            processes.wait_for_all("compiled")  # who waits in a collective has no patience

    def prepared(self, batch: Any) -> bool:
        """Whether `prepare` has nothing to do."""
        return _shape(batch) in self._compiled

    def __call__(
        self, state: TrainState, batch: Any, limit: float = math.inf
    ) -> tuple[TrainState, StepMetrics]:
        """One step; of a loss above `limit` where such steps are skipped."""
        self.prepare(batch)
        limits = (put_scalar(self._run, np.float32(limit)),) if self._limited else ()
        return self._compiled[_shape(batch)](*step_inputs(state), batch, self._key, *limits)


def compiled_step(run: Run) -> CompiledStep:
    """The train step, compiled for the largest batch."""
    step = CompiledStep(run)
    step.prepare(run.reader.largest())
    return step


def _shape(batch: Any) -> tuple[tuple[int, ...], ...]:
    """Of one lane: all batches have as many, of which a process may hold some."""
    return tuple(x.shape[1:] for x in batch)


def _key(run: Run) -> jax.Array:
    """Of the run's seed; an argument of what is compiled, so that seeds share programs."""
    return jax.random.key(run.config.training.seed)
