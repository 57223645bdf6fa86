"""The train state: everything that a training step changes."""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import flax.linen as nn
import jax
from flax.traverse_util import flatten_dict
from jaxtyping import Array, Int, PyTree

from brt import tasks, tree_utils
from brt.config import Config
from brt.training import adapters, trainable

# The token embedding of a model has one of these paths in the tree of parameters.
EMBEDDINGS = (
    "embedding", "token_embed/embedding", "encoder/inputs/token_embed/embedding",
)  # fmt: skip


class TrainState(NamedTuple):
    """All arrays that a training step changes. The position in the data follows from `step`."""

    step: Int[Array, ""]  # int32, number of completed steps
    params: PyTree[Array]  # float32, by the names of the model's modules
    optimizer: PyTree[Array]  # state of the optimizer
    # Caches, recurrent states and memories of all rows of the batch, from which the next step
    # continues; empty if the model has none.
    carry: PyTree[Array]
    model_state: PyTree[Array]  # statistics that the model learns without gradients


def initial_params(config: Config, key: Array | None = None) -> PyTree[Array]:
    """Returns the parameters of a new model and of its adapters, boxed with the names of their
    axes.

    The boxes are `nn.Partitioned`. A `key` of None stands for the key of Training.seed.
    """
    key = jax.random.key(config.training.seed) if key is None else key
    params = tasks.from_config(config).initial_params(config, key)
    return adapters.with_new_adapters(params, config, key)


def merged_params(config: Config, params: PyTree[Array]) -> PyTree[Array]:
    """Returns the parameters that the model computes with: adapters are added to their kernels."""
    return _merged_params(config, params) if config.adapter.rank else params


@partial(jax.jit, static_argnums=0)
def _merged_params(config: Config, params: PyTree[Array]) -> PyTree[Array]:
    return adapters.merge_into_kernels(params, config.adapter, parameter_axes(config))


def parameter_axes(config: Config) -> dict[str, tuple[str | None, ...]]:
    """Returns the names of the axes of each parameter whose axes have names, by its path."""
    boxed = flatten_dict(jax.eval_shape(lambda: initial_params(config)), sep="/")
    return {k: box.names for k, box in boxed.items() if isinstance(box, nn.Partitioned)}


def constant_arrays(config: Config, state: TrainState) -> list[str]:
    """Returns the names of the arrays that no step changes, such as "params/embedding".

    Checkpoints of a run share the files of these arrays.
    """
    _, frozen = trainable.split(state.params, trainable.patterns(config))
    constant = tasks.from_config(config).constant_model_state(config)
    entries = {name: state.model_state[name] for name in constant}
    return list(tree_utils.named({"params": frozen, "model_state": entries}))


def parameter_counts(params: PyTree) -> tuple[int, int]:
    """Returns the number of all parameters, and the number without the token embedding."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    sizes = {jax.tree_util.keystr(path, simple=True, separator="/"): x.size for path, x in leaves}
    return counts_of_sizes(sizes)


def counts_of_sizes(sizes: Mapping[str, int]) -> tuple[int, int]:
    """Like `parameter_counts`, from the size of each array by path: "decoder/embedding"."""
    total = sum(sizes.values())
    return total, total - next((sizes[name] for name in EMBEDDINGS if name in sizes), 0)
