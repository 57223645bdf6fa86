"""Computes the shardings of the train state: the mesh axes over which each array is sharded."""

import jax
import numpy as np
from flax.traverse_util import flatten_dict
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from brt import tasks
from brt.config import Config
from brt.distributed import rules
from brt.distributed.mesh import replicated
from brt.distributed.rules import Names
from brt.training import replicas
from brt.training.matrices import Axes, matrix_names, matrix_shape
from brt.training.state import TrainState

# For each matrix, Adafactor stores two means of the second moments, `v_row` and `v_col`, each of
# which lacks one axis of the matrix. The table says which axis is lacking, as an index into the
# axes sorted by size: -1 is the longest axis, and -2 the second longest.
_DROPPED_AXIS = {"v_row": -1, "v_col": -2}


def state_shardings(
    mesh: jax.sharding.Mesh, config: Config, state: TrainState, axes: Axes
) -> TrainState:
    """Returns the sharding of every array of a train state, as a train state of shardings.

    `state` has the shapes and dtypes of the arrays, and `axes` the names of each parameter's axes,
    by the parameter's path (see `state.parameter_axes`).
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
    """Names the axes of an array of the optimizer's state; None for an axis that is not sharded.

    The array belongs to the parameter whose name is in `path`, the array's path in the optimizer's
    state. It has the shape of that parameter as a matrix, or lacks one axis of the matrix
    (Adafactor's factored moments).

    Args:
      axes: names of the parameters' axes, by path.
      shapes: shapes of the parameters, by path.
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
