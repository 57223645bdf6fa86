"""What a run carries from step to step, and what it starts from."""

from collections.abc import Mapping
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict
from jaxtyping import Array, Int, PyTree

from brt import tasks
from brt.config import Config

EMBEDDINGS = (  # where models keep it
    "embedding", "token_embed/embedding", "encoder/inputs/token_embed/embedding",
)  # fmt: skip


class TrainState(NamedTuple):
    """Everything that changes in training, but for the data position, which is the step.

    Attributes:
      step: int32, finished steps.
      params: float32, as the model names them.
      optimizer: of `params`.
      carry: caches and recurrent states of the lanes, where the model has any.
      model_state: what is learned without gradients.
    """

    step: Int[Array, ""]
    params: PyTree[Array]
    optimizer: PyTree[Array]
    carry: PyTree[Array]
    model_state: PyTree[Array]


def initial_params(config: Config, key: Array | None = None) -> PyTree[Array]:
    """Parameters, each boxed with the names of its axes; `key` is that of the run's seed."""
    key = jax.random.key(config.training.seed) if key is None else key
    return tasks.of(config).initial_params(config, key)


def parameter_axes(config: Config) -> dict[str, tuple[str | None, ...]]:
    """The names of every parameter's axes, by its path; none that has none."""
    boxed = flatten_dict(jax.eval_shape(lambda: initial_params(config)), sep="/")
    return {k: box.names for k, box in boxed.items() if isinstance(box, nn.Partitioned)}


def initial_state(
    config: Config, optimizer: optax.GradientTransformation, key: Array | None = None
) -> TrainState:
    """Step 0. Traceable: `eval_shape` gives the shapes, `jit` the sharded arrays."""
    task, params = tasks.of(config), nn.meta.unbox(initial_params(config, key))
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        optimizer=optimizer.init(params),
        carry=task.initial_carry(config, config.training.batch_size),
        model_state=task.initial_model_state(config),
    )


def parameter_counts(params: PyTree) -> tuple[int, int]:
    """All parameters, and those that are not the embedding; of arrays or of their shapes."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    sizes = {jax.tree_util.keystr(path, simple=True, separator="/"): x.size for path, x in leaves}
    return counts(sizes)


def counts(sizes: Mapping[str, int]) -> tuple[int, int]:
    """The same, of sizes by name."""
    total = sum(sizes.values())
    return total, total - next((sizes[name] for name in EMBEDDINGS if name in sizes), 0)
