"""A run made of its config: corpus, devices, optimizer, shapes. Nothing is trained here."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from brt.config import Config
from brt.config_io import difference
from brt.data import preparation
from brt.data.lanes import LaneReader
from brt.data.preparation import Corpus
from brt.data.tokenizers import Tokenizer
from brt.errors import ConfigError
from brt.models.decoder import compute_dtype
from brt.training import compilation
from brt.training import optimizer as optimizers
from brt.training.sharding import by_lane, make_mesh, replicated, state_shardings
from brt.training.state import TrainState, initial_state
from brt.training.step import StepMetrics, train_step
from brt.types import Batch

# Fields that may change between a checkpoint and its resumption; all others decide what the
# arrays are or what they mean.
_FREE_SECTIONS = ("Checkpoint.", "Evaluation.", "Sampling.", "Mesh.")
_FREE_FIELDS = {
    "Model.layer_unroll", "Model.block_unroll", "Model.remat", "Model.dropout",
    "Training.steps", "Training.gradient_accumulation", "Training.loss_chunk",
    "Training.log_every", "Training.evaluate_every", "Training.sample_every",
    "Training.probe_every", "Training.plots",
    "Optimizer.learning_rate", "Optimizer.schedule", "Optimizer.warmup_steps",
    "Optimizer.final_learning_rate", "Optimizer.weight_decay",
    "Data.cache_dir", "Data.store", "Data.train", "Data.validation", "Data.test",
    "Data.validation_fraction", "Data.test_fraction", "Data.tokenizer", "Data.errors",
    "Data.text_field",
}  # fmt: skip


class Run(NamedTuple):
    """What training and a dry run need.

    Attributes:
      config: with the vocabulary size set.
      abstract: shapes, dtypes and shardings of the train state.
    """

    config: Config
    corpus: Corpus
    reader: LaneReader
    mesh: jax.sharding.Mesh
    optimizer: optax.GradientTransformation
    abstract: TrainState


def written_out(config: Config, tokenizer: Tokenizer) -> Config:
    """The config with what depends on tokenizer and machine written out: vocabulary and dtype.

    Raises:
      ConfigError: it is set, and too small.
    """
    wanted, size = config.model.vocab_size, tokenizer.vocab_size
    if wanted and wanted < size:
        raise ConfigError(
            f"Model.vocab_size = {wanted} is too small for the tokenizer {tokenizer.name} with "
            f"{size} ids; set it to 0 to take the tokenizer's"
        )
    dtype = compute_dtype(config.model).name
    model = dataclasses.replace(config.model, vocab_size=wanted or size, dtype=dtype)
    return dataclasses.replace(config, model=model)


def build(config: Config, *, progress: bool = True) -> Run:
    """Prepares the data and shapes everything."""
    compilation.use_cache(preparation.cache_directory(config.data))
    mesh = make_mesh(config.mesh)
    corpus = preparation.prepare(config.data, progress=progress)
    config = written_out(config, corpus.tokenizer)
    t = config.training
    reader = LaneReader(
        store=corpus.split("train"), batch_size=t.batch_size, segment_length=t.segment_length,
        window=config.model.window, seed=t.seed, shuffle=config.data.shuffle,
    )  # fmt: skip
    optimizer = optimizers.build(config.optimizer, t.steps)
    shapes = jax.eval_shape(partial(initial_state, config, optimizer))
    shardings = state_shardings(mesh, shapes)
    abstract = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings,
    )
    return Run(config, corpus, reader, mesh, optimizer, abstract)


def new_state(run: Run) -> TrainState:
    """The state at step 0, made on the devices where it belongs."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, run.abstract)
    init = partial(initial_state, run.config, run.optimizer)
    return jax.jit(init, out_shardings=shardings)(_key(run))


def put(run: Run, batch: Batch) -> Batch:
    """A host batch on the devices, by lanes."""
    return jax.device_put(batch, by_lane(run.mesh))


def compiled_step(run: Run) -> Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]:
    """The train step, compiled; it takes the state's memory over."""
    t, window = run.config.training, run.config.model.window
    lanes = by_lane(run.mesh)

    def array(length: int, dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((t.batch_size, length), dtype, sharding=lanes)

    batch = Batch(
        inputs=array(t.segment_length, jnp.int32),
        targets=array(t.segment_length, jnp.int32),
        scored=array(t.segment_length, jnp.bool_),
        document_start=array(t.segment_length // window, jnp.bool_),
    )
    shardings = jax.tree.map(lambda leaf: leaf.sharding, run.abstract)
    metrics = StepMetrics(*[replicated(run.mesh)] * len(StepMetrics._fields))
    step = partial(train_step, config=run.config, optimizer=run.optimizer)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, metrics))
    key = jax.device_put(_key(run), replicated(run.mesh))
    compiled = jitted.lower(run.abstract, batch, key).compile()
    return lambda state, batch: compiled(state, batch, key)


def _key(run: Run) -> jax.Array:
    """Of the run's seed; an argument of what is compiled, so that seeds share programs."""
    return jax.random.key(run.config.training.seed)


def check_resumable(saved: Config, wanted: Config) -> list[str]:
    """Describes what differs from the checkpoint's config.

    Raises:
      ConfigError: a difference that makes another run of it.
    """
    differences = difference(saved, wanted)
    fixed = [
        f"{name} was {old!r} and is {new!r}"
        for name, old, new in differences
        if name not in _FREE_FIELDS and not name.startswith(_FREE_SECTIONS)
    ]
    if fixed:
        raise ConfigError(
            f"this workdir holds another run: {'; '.join(fixed)}; set it back, or choose another "
            "--workdir"
        )
    return [f"{name}: {old!r} -> {new!r}" for name, old, new in differences]


def batch_tokens(config: Config) -> int:
    """Positions that a step reads, padding included."""
    return int(np.prod((config.training.batch_size, config.training.segment_length)))
