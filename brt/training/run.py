"""Builds a run from its config: data, devices, optimizer, array shapes, and the compiled step.

A new run may start from weights (Training.init_from). Its config is then adapted to the weights.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jaxtyping import Array, PyTree

from brt import tasks, tree_utils, user_cache
from brt.checkpointing import reader
from brt.checkpointing.reader import VerifiedCheckpoint, join
from brt.config import Config, Data, Model
from brt.config.fields import settings
from brt.config.kinds import kind_sections
from brt.config.model import PARTS
from brt.config.names import names_in_weights
from brt.config.shared import public_name
from brt.config_io import config_from_json
from brt.data.readers import Reader
from brt.distributed import mesh as meshes
from brt.distributed import processes
from brt.distributed.mesh import by_lane, replicated
from brt.errors import CheckpointError, ConfigError, NonFiniteError
from brt.interop.huggingface import hub
from brt.ops import compiler_options
from brt.tasks.interface import Dataset, Task
from brt.tasks.weights import Weights, with_steps
from brt.training import data_manifest, layer_forms, replicas, saved_model, trainable
from brt.training import optimizer as optimizers
from brt.training.layerwise import Stepper
from brt.training.state import (
    TrainState,
    initial_params,
    parameter_axes,
    parameter_shapes,
    state_shardings,
)
from brt.training.step import StepMetrics, train_step
from brt.training.workdir import Workdir


class Shapes(NamedTuple):
    """Devices, optimizer and array shapes of a run, which follow from the run's config."""

    mesh: jax.sharding.Mesh
    optimizer: Stepper
    # The train state with `jax.ShapeDtypeStruct` (shape, dtype, sharding) in place of arrays.
    state_shapes: TrainState


class Run(NamedTuple):
    """A run that is ready to be trained."""

    config: Config  # sizes that depend on data and machine are filled in
    task: Task
    dataset: Dataset  # the splits of the data, and the tokenizer
    reader: Reader  # reads the batches of the training data
    weights: Weights | None  # what Training.init_from names; None if the setting is empty
    mesh: jax.sharding.Mesh
    optimizer: Stepper
    state_shapes: TrainState


def build(
    config: Config,
    *,
    resumed: tuple[Workdir, VerifiedCheckpoint] | None = None,
    progress: bool = True,
) -> Run:
    """Prepares the data of a run, computes the shapes of its arrays, and returns the run.

    `resumed` is the run directory, and the checkpoint that the run resumes from. The run uses what
    they contain instead of the weights of Training.init_from and the file of Data.tokenizer,
    because these weights and this file may have been removed.
    """
    user_cache.share_compiled_programs()
    weights = find_weights(config, resumed and resumed[1])
    config, dataset, reader = prepare(config, weights, resumed, progress)
    shapes = compute_shapes(config)
    return Run(config, tasks.from_config(config), dataset, reader, weights, *shapes)


def without_data(config: Config) -> Shapes | None:
    """Returns the shapes of a run without opening its data; None if this is not possible.

    It is not possible if the data determine the size of the vocabulary, or if Training.init_from is
    set.
    """
    task = tasks.from_config(config)
    if config.training.init_from or not task.sizes_are_configured(config):
        return None
    tasks.check(config)
    return compute_shapes(config)


def compute_shapes(config: Config, devices: Sequence[jax.Device] | None = None) -> Shapes:
    """Returns the mesh and the optimizer of a run, and the shapes of its train state.

    In `config`, sizes that depend on the data are filled in. `devices` may be descriptions of
    hardware that this machine lacks; None stands for the devices of this machine.
    """
    mesh = meshes.build(config.mesh, tasks.from_config(config).sharded_sizes(config), devices)
    axes = parameter_axes(config)
    name = config.kernels.adafactor
    optimizer = optimizers.build(config.optimizer, config.training.steps, axes, name)
    new = lambda params: _state_of(config, optimizer, nn.meta.unbox(params))  # noqa: E731
    shapes = jax.eval_shape(new, parameter_shapes(config))
    paths, kind = list(flatten_dict(shapes.params, sep="/")), "parameters of the model"
    trainable.check_patterns("Training.trainable", config.training.trainable, paths, kind)
    optimizers.check_rates(
        trainable.split(shapes.params, trainable.patterns(config))[0], config.optimizer
    )
    state_shapes = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        state_shardings(mesh, config, shapes, axes),
    )
    return Shapes(mesh, optimizer, state_shapes)


def prepare(
    config: Config,
    weights: Weights | None = None,
    resumed: tuple[Workdir, VerifiedCheckpoint] | None = None,
    progress: bool = True,
) -> tuple[Config, Dataset, Reader]:
    """Opens the data of a run; tokenizes and stores them first if necessary.

    `resumed` is as in `build`. In the returned config, the sizes that depend on the data are filled
    in. The returned reader reads the training batches.
    """
    task = tasks.from_config(config)
    if weights:
        config = with_model(config, weights)
    tasks.check(config)
    named = config
    if resumed:
        named = data_manifest.with_own_tokenizer(config, *resumed)
        named = data_manifest.with_found_store(named, resumed[0])
    dataset = task.open(named, progress=progress)
    if weights:
        config = task.with_weights(config, weights, dataset.tokenizer)
    config = task.resolve(config, dataset)
    reader = task.reader(config, dataset)
    return with_steps(config, reader.steps_per_epoch), dataset, reader


def new_state(run: Run, say: Callable[[str], object] = print) -> TrainState:
    """Returns the train state at step 0, on the devices of the run.

    Parameters are random, or the weights that Training.init_from names. `say` is called with a
    message if the weights lack parameters of the model, or have parameters that the model lacks.
    """
    shardings = jax.tree.map(lambda leaf: leaf.sharding, run.state_shapes)
    init = partial(initial_state, run.config, run.optimizer)
    options = dict(compiler_options.options(run.config.model.model_dim))
    with meshes.use(run.mesh):
        create = jax.jit(init, out_shardings=shardings, compiler_options=options)
        state = create(_key(run))
    if not run.weights:
        return state
    where = run.weights.where
    for note in run.weights.notes:
        say(f"{where}: {note}")
    model_params, factors = trainable.split_adapters(state.params)
    params, new, unread = run.task.start(run.config, run.weights, model_params)
    if factors:
        params = {**params, trainable.ADAPTERS: factors}
    if new:
        say(f"initialized, because {where} lacks them: {', '.join(new)}")
    if unread:
        say(f"not used, because this model lacks them: of {where} {', '.join(unread)}")
    if bad := tree_utils.not_finite(tree_utils.named(params)):
        raise NonFiniteError(
            f"the weights of {where} hold NaN or infinity in {join(bad)}; start from others"
        )
    model_state = run.task.start_model_state(run.config, run.weights, state.model_state)
    return state._replace(
        params=jax.device_put(params, shardings.params),
        # A teacher in the model state may have the same arrays as `params`. The model state is
        # copied, because a step donates the memory of `params`.
        model_state=jax.device_put(model_state, shardings.model_state, may_alias=False),
    )


def local_reader(run: Run) -> Reader:
    """Returns the run's reader, restricted to the rows that are on this process's devices."""
    if not processes.several():
        return run.reader
    lanes = meshes.local_lanes(run.mesh, run.config.training.batch_size)
    return dataclasses.replace(run.reader, lanes=lanes)


def put(run: Run, batch: Any) -> Any:
    """Puts a batch onto the devices of a run, sharded by row.

    `batch` has the rows of this process (`local_reader`), and the result has all rows of the step.
    """
    if not processes.several():
        return jax.device_put(batch, by_lane(run.mesh))
    lanes = run.config.training.batch_size
    local_lanes = meshes.local_lanes(run.mesh, lanes)
    return jax.tree.map(lambda x: meshes.global_array(run.mesh, x, local_lanes, lanes), batch)


def put_scalar(run: Run, value: np.generic) -> jax.Array:
    """Returns `value` as an array of shape [] on all devices; all processes pass the same value."""
    return jax.make_array_from_callback((), replicated(run.mesh), lambda _: np.asarray(value))


def lowered_step(config: Config, shapes: Shapes | Run, batch: Any) -> jax.stages.Lowered:
    """Returns the train step, lowered for Training.batch_size rows and the other sizes of `batch`.

    The lowered step has these arguments:

    - the two results of `step_inputs` for a train state in the form of `layer_forms.step_shapes`
    - a batch
    - the random key
    - if `skips_spikes` is True: the loss above which the step leaves the train state unchanged
    """
    mesh, lanes = shapes.mesh, by_lane(shapes.mesh)
    state_shapes = layer_forms.step_shapes(config, shapes.state_shapes, mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state_shapes)

    def step(params: Any, rest: TrainState, *inputs: Any) -> tuple[TrainState, StepMetrics]:
        state = rest._replace(params=params)
        return train_step(state, *inputs, config=config, optimizer=shapes.optimizer)

    # If replicas shard the optimizer, but not the parameters, the new parameters are the output of
    # an all-gather, which cannot use the memory of the old parameters. Donating the old parameters
    # would only add a copy.
    has_stacks = state_shapes is shapes.state_shapes
    gathers = has_stacks and replicas.shards_optimizer(config.optimizer, mesh)
    donated = (1,) if gathers else (0, 1)
    # `out_shardings` has a sharding for each array of the state, and one for all metrics.
    jitted = jax.jit(step, donate_argnums=donated, out_shardings=(shardings, replicated(mesh)))

    # In a run of several processes, `x` may have only the rows of this process. The result has the
    # rows of all processes.
    def with_all_lanes(x: Any) -> jax.ShapeDtypeStruct:
        shape = (config.training.batch_size, *x.shape[1:])
        # NumPy arrays may have the dtype int64, which jax converts to int32 when it puts a batch
        # onto devices.
        return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(x.dtype), sharding=lanes)

    key = jax.eval_shape(lambda: jax.random.key(0))
    key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=replicated(mesh))
    limit = jax.ShapeDtypeStruct((), np.float32, sharding=replicated(mesh))
    limits = (limit,) if skips_spikes(config) else ()
    with meshes.use(mesh):
        inputs = step_inputs(state_shapes)
        return jitted.lower(*inputs, jax.tree.map(with_all_lanes, batch), key, *limits)


def step_inputs(state: TrainState) -> tuple[Any, TrainState]:
    """Returns the first two arguments of `lowered_step`: parameters, and the rest of the state."""
    return state.params, state._replace(params=None)


def skips_spikes(config: Config) -> bool:
    """Returns True if a step whose loss exceeds a limit leaves the train state unchanged."""
    return config.training.on_bad_step == "skip" and bool(config.training.spike_factor)


class CompiledStep:
    """The train step, which is compiled once for each shape of its batches."""

    def __init__(self, run: Run):
        self._key = jax.jit(lambda: _key(run), out_shardings=replicated(run.mesh))()
        self._run = run
        self._limited = skips_spikes(run.config)
        # The method `stacked` converts a train state of either form to the form with stacks. It
        # donates the memory of the given state.
        forms = layer_forms.conversions(run.config, run.state_shapes, run.mesh)
        self._for_step, self.stacked = forms
        self._compiled: dict[tuple, Any] = {}

    def prepare(self, batch: Any) -> None:
        """Compiles the step for batches with the shapes of `batch`, unless that was done before."""
        if (shape := _shape(batch)) not in self._compiled:
            lowered = lowered_step(self._run.config, self._run, batch)
            options = compiler_options.options(self._run.config.model.model_dim)
            self._compiled[shape] = lowered.compile(options)
            # All processes start the step together, because a process that waits in a collective
            # operation for a process that still compiles would soon give up.
            processes.wait_for_all("compiled")

    def prepared(self, batch: Any) -> bool:
        return _shape(batch) in self._compiled

    def __call__(
        self, state: TrainState, batch: Any, limit: float = math.inf
    ) -> tuple[TrainState, StepMetrics]:
        """Runs a step, which is compiled first if necessary; the memory of `state` is donated.

        `state` has either form of `layer_forms`, and the new state has the form of the compiled
        step. `limit` is the loss in nats per token above which the step leaves the state unchanged
        (see `skips_spikes`).
        """
        self.prepare(batch)
        state = self._for_step(state)
        limits = (put_scalar(self._run, np.float32(limit)),) if self._limited else ()
        return self._compiled[_shape(batch)](*step_inputs(state), batch, self._key, *limits)


def compiled_step(run: Run) -> CompiledStep:
    step = CompiledStep(run)
    step.prepare(run.reader.largest())
    return step


def _shape(batch: Any) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of a batch's arrays without the first axis, whose size never changes."""
    return tuple(x.shape[1:] for x in batch)


def _key(run: Run) -> jax.Array:
    return jax.random.key(run.config.training.seed)


def initial_state(config: Config, optimizer: Stepper, key: Array | None = None) -> TrainState:
    """Returns the train state at step 0; a `key` of None stands for the key of Training.seed."""
    return _state_of(config, optimizer, nn.meta.unbox(initial_params(config, key)))


def _state_of(config: Config, optimizer: Stepper, params: PyTree[Array]) -> TrainState:
    task = tasks.from_config(config)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        optimizer=optimizer.init(trainable.split(params, trainable.patterns(config))[0]),
        carry=task.initial_carry(config, config.training.batch_size),
        model_state=task.initial_model_state(config),
    )


_BYTES = Data().tokenizer  # the default; the tokenizer of weights replaces only this value


def find_weights(config: Config, checkpoint: VerifiedCheckpoint | None = None) -> Weights | None:
    """Returns the weights that Training.init_from names; None if the setting is empty.

    Training.init_from names a run directory, a directory of weights that brt.convert wrote or in
    Hugging Face's format, or a model of the Hugging Face Hub. If the run resumes from `checkpoint`,
    the checkpoint describes the weights, and the weights themselves are not read.
    """
    where, task = config.training.init_from, tasks.from_config(config)
    if not where:
        return None
    if checkpoint:
        saved = config_from_json(checkpoint.meta["config"])
        return weights_of_run(where, config, saved, checkpoint.meta["tokenizer"])
    directory = hub.directory(where)
    if not directory.exists():
        raise CheckpointError(
            f"Training.init_from = {where!r}: there is no such directory; name one, or a model of "
            "the Hugging Face Hub by OWNER/NAME"
        )
    if not reader.present(Workdir(directory).checkpoints):
        return task.load_converted(config, directory)
    workdir, checkpoint, source_config = saved_model.load_config(directory)
    model = functools.cache(lambda: saved_model.load(workdir, checkpoint, source_config))
    weights = weights_of_run(where, config, source_config, checkpoint.meta["tokenizer"])
    names = ("tokenizer.json", "tokenizer.model")
    files = (workdir.tokenizer / name for name in names)
    return weights._replace(
        load=lambda: model().params, load_model_state=lambda: model().model_state,
        tokenizer_file=next((str(file) for file in files if file.is_file()), ""),
    )  # fmt: skip


def weights_of_run(where: str, config: Config, source_config: Config, tokenizer: str) -> Weights:
    """Returns a `Weights` that only describes the weights of a run and cannot load their arrays.

    A resumed run needs only the description, because its parameters come from its own checkpoint.
    `where` is as in Training.init_from, `source_config` is the config of the run that trained the
    weights, and `tokenizer` is the fingerprint of the tokenizer of that run.
    """
    task, source_task = tasks.from_config(config), tasks.from_config(source_config)
    if source_task.model != task.model:
        raise CheckpointError(
            f"{where} is the run of another model: it trained {source_task.name}, and {task.name} "
            f"starts from weights of {type(getattr(config, task.model)).__name__}; name such a run "
            "in Training.init_from"
        )

    def load() -> Any:
        raise AssertionError("a resumed run takes its parameters from its own checkpoint")

    return Weights(
        where, getattr(source_config, task.model), tokenizer, source_task.name, load,
        tokenizer_file=getattr(getattr(source_config, source_task.data), "tokenizer", ""),
    )  # fmt: skip


def with_model(config: Config, weights: Weights) -> Config:
    """Returns a config whose model section is merged with the model section of the weights.

    Each setting of the model declares in `brt.config` where its value comes from. The value of an
    "own" setting comes from the new run, and the value of an "inherited" setting from the weights.
    The value of an "adaptable" setting comes from the new run if the new run sets it to another
    value than the default, or if Training.init_keep names the setting. Otherwise it comes from the
    weights. ConfigError is raised if the config contradicts the weights, for example if it sets an
    "inherited" setting to a value that is neither the default nor that of the weights.
    """
    task, kept = tasks.from_config(config), config.training.init_keep
    task.check_weights(weights)
    if others := {*kept} - names_in_weights():
        raise ConfigError(
            f"Training.init_keep names {min(others)!r}, which is no setting that weights have; "
            "leave it out"
        )
    section = task.model
    requested, trained = getattr(config, section), weights.model

    def merged(requested: Any, trained: Any) -> Any:
        changes = _changes(requested, trained, weights.where, kept)
        return dataclasses.replace(trained, **changes)

    changes = _changes(requested, trained, weights.where, kept)
    if isinstance(requested, Model):
        types = kind_sections().values()
        kinds = (merged(requested.of(kind), trained.of(kind)) for kind in types)
        changes["kinds"] = tuple(kind for kind in kinds if any(kind.layers_by_kind().values()))
        for field in PARTS.values():
            changes[field] = merged(getattr(requested, field), getattr(trained, field))
    model = dataclasses.replace(trained, **changes)
    data = config.data
    if isinstance(requested, Model) and weights.tokenizer_file and data.tokenizer == _BYTES:
        data = dataclasses.replace(data, tokenizer=weights.tokenizer_file)
    return dataclasses.replace(config, **{section: model, "data": data})


def _changes(requested: Any, trained: Any, where: str, kept: Collection[str]) -> dict[str, Any]:
    """Returns the names and values of the settings of `requested` that replace those of `trained`.

    `requested` is a section of the new run's config, and `trained` is that section of the weights.
    """
    section, defaults = type(requested), type(requested)()
    changes: dict[str, Any] = {}
    for name, setting in settings(section).items():
        value, default, old = (getattr(model, name) for model in (requested, defaults, trained))
        own = f"{section.__name__}.{name}"
        adaptable = setting.warm_start == "adaptable"
        # Floats are compared as float32, because weights that were converted from other formats
        # have, for example, 9.9999997e-06 for 1e-05.
        floats = isinstance(value, float) and isinstance(old, float)
        equal = np.float32(value) == np.float32(old) if floats else value == old
        chosen = value != default or public_name(own) in kept
        if setting.warm_start == "own" or (adaptable and chosen):
            changes[name] = value
        elif chosen and not (adaptable or equal):
            raise ConfigError(
                f"{public_name(own)} = {value!r}, but the weights of Training.init_from = "
                f"{where!r} have {old!r}; leave it out"
            )
    return changes
