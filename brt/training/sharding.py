"""What of a train state lies where."""

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

# Adafactor's moments of a matrix lack one of its axes: by size, the last or the one before it.
_LACKS = {"v_row": -1, "v_col": -2}


def state_shardings(
    mesh: jax.sharding.Mesh, config: Config, state: TrainState, axes: Axes
) -> TrainState:
    """The sharding of every leaf of a train state.

    Args:
      axes: of the parameters, see `parameter_axes`.
    """
    shapes = {name: leaf.shape for name, leaf in flatten_dict(state.params, sep="/").items()}

    def of_optimizer(path: tuple, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        names = _moment_names(path, leaf.shape, axes, shapes)
        spec = rules.spec(names, leaf.shape, mesh)
        if replicas.share_state(config.optimizer, mesh):
            spec = replicas.share(names, leaf.shape, replicas.number(mesh))
        kind = "pinned_host" if config.optimizer.offload else None
        return NamedSharding(mesh, spec, memory_kind=kind)

    carry_axes = tasks.of(config).carry_axes(config)
    return TrainState(
        step=replicated(mesh),
        params=parameter_shardings(mesh, state.params, axes),
        optimizer=jax.tree.map_with_path(of_optimizer, state.optimizer),
        carry=jax.tree.map(
            lambda leaf, names: NamedSharding(mesh, rules.spec(names, leaf.shape, mesh)),
            state.carry, carry_axes,
        ),
        model_state=jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), state.model_state),
    )  # fmt: skip


def parameter_shardings(
    mesh: jax.sharding.Mesh, params: PyTree[jax.ShapeDtypeStruct], axes: Axes
) -> PyTree[NamedSharding]:
    """That of every parameter."""

    def of_parameter(path: tuple, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        names = axes.get("/".join(key.key for key in path), (None,) * leaf.ndim)
        return NamedSharding(mesh, rules.parameter_spec(names, leaf.shape, mesh))

    return jax.tree.map_with_path(of_parameter, params)


def _moment_names(
    path: tuple, shape: tuple[int, ...], axes: Axes, shapes: dict[str, tuple[int, ...]]
) -> Names:
    """The names of the axes of an optimizer's array, by where it is and by its shape.

    They are those of the parameter as a matrix, or of what is left of it.
    """
    keys = [getattr(key, "key", getattr(key, "name", None)) for key in path]
    whole: Names = (None,) * len(shape)
    if "matrices" in keys and len(shape) == 3:
        return ("matrices", None, None)
    found = next((key for key in keys if key in shapes), None)
    if found is None or found not in axes:
        return whole
    names, size = matrix_names(axes[found]), matrix_shape(axes[found], shapes[found])
    if size == shape:
        return names if rules.is_cut(names) else whole
    lacking = [_LACKS[key] for key in keys if key in _LACKS]
    own = slice(int(names[:1] == ("layers",)), None)
    if not lacking or len(size[own]) < 2:
        return whole
    dropped = int(np.argsort(size[own])[lacking[0]]) + own.start
    left = (*names[:dropped], *names[dropped + 1 :])
    return left if (*size[:dropped], *size[dropped + 1 :]) == shape else whole
