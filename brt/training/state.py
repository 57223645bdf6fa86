"""The train state: everything that a training step changes.

The sharding of each array follows from the names of its axes (`brt.distributed.rules`).
"""

from functools import lru_cache, partial
from typing import NamedTuple

import flax.linen as nn
import jax
import numpy as np
from flax.traverse_util import flatten_dict
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int, PyTree

from brt import tasks, tree_utils
from brt.config import Config
from brt.distributed import rules
from brt.distributed.mesh import replicated
from brt.distributed.rules import Names
from brt.tasks.interface import Task
from brt.training import replicas, trainable
from brt.training.matrices import Axes, matrix_names, matrix_shape

# The token embedding of a model has one of these paths in the tree of parameters.
EMBEDDINGS = (
    "embedding", "token_embed/embedding", "encoder/inputs/token_embed/embedding",
)  # fmt: skip


class TrainState(NamedTuple):
    """All arrays that a training step changes. The position in the data follows from `step`."""

    step: Int[Array, ""]  # int32, number of completed steps
    params: PyTree[Array]  # float32; the keys are names of the model's modules
    optimizer: PyTree[Array]  # state of the optimizer
    # Caches, recurrent states and memories of all rows of the batch, from which the next step
    # continues; empty if the model has none.
    carry: PyTree[Array]
    model_state: PyTree[Array]  # statistics that the model learns without gradients


def initial_params(config: Config, key: Array | None = None) -> PyTree[Array]:
    """Returns the parameters of a new model and of its adapters, boxed with the names of the axes.

    The boxes are `nn.Partitioned`. A `key` of None stands for the key of Training.seed.
    """
    key = jax.random.key(config.training.seed) if key is None else key
    params = tasks.from_config(config).initial_params(config, key)
    return trainable.with_new_adapters(params, config, key)


def merged_params(config: Config, params: PyTree[Array]) -> PyTree[Array]:
    """Returns the parameters that the model computes with: adapters are added to their kernels."""
    return _merged_params(config, params) if config.adapter.rank else params


@partial(jax.jit, static_argnums=0)
def _merged_params(config: Config, params: PyTree[Array]) -> PyTree[Array]:
    return trainable.merge_into_kernels(params, config.adapter, parameter_axes(config))


def parameter_shapes(config: Config) -> PyTree[jax.ShapeDtypeStruct]:
    """Returns the result of `initial_params` with shapes in place of arrays."""
    return _parameter_shapes(config, tasks.from_config(config))


@lru_cache(maxsize=16)  # Each call traces the whole model, and a starting run calls it often.
def _parameter_shapes(config: Config, _: Task) -> PyTree[jax.ShapeDtypeStruct]:
    return jax.eval_shape(lambda: initial_params(config))


def parameter_axes(config: Config) -> dict[str, tuple[str | None, ...]]:
    """Returns a dictionary from the path of each parameter to the names of the parameter's axes.

    Parameters whose axes have no names are left out.
    """
    boxed = flatten_dict(parameter_shapes(config), sep="/")
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
    sizes = {name: x.size for name, x in tree_utils.named(params).items()}
    total = sum(sizes.values())
    return total, total - next((sizes[name] for name in EMBEDDINGS if name in sizes), 0)


# For each matrix, Adafactor stores two means of the second moments, `v_row` and `v_col`. Each mean
# lacks one axis of the matrix. The table says which one, as an index into the axes sorted by size:
# -1 is the longest axis, and -2 the second longest.
_DROPPED_AXIS = {"v_row": -1, "v_col": -2}


def state_shardings(
    mesh: jax.sharding.Mesh, config: Config, state: TrainState, axes: Axes
) -> TrainState:
    """Returns the sharding of every array of a train state, as a train state of shardings.

    `state` has the shapes and dtypes of the arrays. `axes` is the result of `parameter_axes`.
    """
    shapes = {name: leaf.shape for name, leaf in flatten_dict(state.params, sep="/").items()}

    def optimizer_sharding(path: tuple, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        names = _moment_names(path, leaf.shape, axes, shapes)
        spec = rules.spec(names, leaf.shape, mesh)
        if replicas.shards_optimizer(config.optimizer, mesh):
            spec = replicas.shard_spec(names, leaf.shape, replicas.count(mesh))
        kind = "pinned_host" if config.optimizer.offload else None
        return NamedSharding(mesh, spec, memory_kind=kind)

    carry_axes = tasks.from_config(config).carry_axes(config)
    return TrainState(
        step=replicated(mesh),
        params=parameter_shardings(mesh, state.params, axes),
        optimizer=jax.tree.map_with_path(optimizer_sharding, state.optimizer),
        carry=jax.tree.map(
            lambda leaf, names: NamedSharding(mesh, rules.spec(names, leaf.shape, mesh)),
            state.carry, carry_axes,
        ),
        model_state=jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), state.model_state),
    )  # fmt: skip


def parameter_shardings(
    mesh: jax.sharding.Mesh, params: PyTree[jax.ShapeDtypeStruct], axes: Axes
) -> PyTree[NamedSharding]:
    """Returns the sharding of every parameter, which follows from the names of its axes."""

    def parameter_sharding(path: tuple, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        names = axes.get("/".join(key.key for key in path), (None,) * leaf.ndim)
        return NamedSharding(mesh, rules.parameter_spec(names, leaf.shape, mesh))

    return jax.tree.map_with_path(parameter_sharding, params)


def _moment_names(
    path: tuple, shape: tuple[int, ...], axes: Axes, shapes: dict[str, tuple[int, ...]]
) -> Names:
    """Returns names for the axes of an array of the optimizer's state; None for unsharded axes.

    `path` is the path of the array in the optimizer's state. It contains the name of the parameter
    to which the array belongs. The array has the shape of this parameter as a matrix, or lacks one
    axis of the matrix (Adafactor's factored moments). `axes` and `shapes` map the paths of
    parameters to the names of their axes and to their shapes.
    """
    keys = [getattr(key, "key", getattr(key, "name", None)) for key in path]
    replicated: Names = (None,) * len(shape)
    if "matrices" in keys and len(shape) == 3:
        return ("matrices", None, None)
    parameter = next((key for key in keys if key in shapes), None)
    if parameter is None or parameter not in axes:
        return replicated
    names = matrix_names(axes[parameter])
    size = matrix_shape(axes[parameter], shapes[parameter])
    if size == shape:
        return names if rules.is_matrix(names) else replicated
    factored = [_DROPPED_AXIS[key] for key in keys if key in _DROPPED_AXIS]
    # The slice removes the axis of stacked layers, if the parameter has one.
    matrix = slice(int(names[:1] == ("layers",)), None)
    if not factored or len(size[matrix]) < 2:
        return replicated
    dropped = int(np.argsort(size[matrix])[factored[0]]) + matrix.start
    remaining = (*names[:dropped], *names[dropped + 1 :])
    return remaining if (*size[:dropped], *size[dropped + 1 :]) == shape else replicated
