"""The two forms of a train state: with stacks of layers, and with a separate array for each layer.

Models, checkpoints and evaluations have the parameters of equal layers in one array with an axis of
layers, a stack. A step that calls its layers without a loop would cut every stack into layers, and
would put the gradients of the layers into a new stack. On TPUs, this takes 5 % of a step. On
accelerators, the step therefore reads and writes a train state in the separate form, which has a
list of arrays, one for each layer, in place of a stack. In the same way, the optimizer's state of a
stack (`layerwise.LayerwiseState.stacked`) is a list of states. On a single GPU the step keeps
stacks, because the optimizer then launches only a third as many GPU kernels.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from brt import tasks
from brt.config import Config
from brt.ops import dispatch
from brt.training import replicas
from brt.training.layerwise import LayerwiseState
from brt.training.matrices import Axes
from brt.training.state import TrainState, parameter_axes


def separates(config: Config) -> bool:
    """Returns True if the compiled step of a config has its train state in the separate form.

    In this form, each layer of a stack has arrays of its own. A step has this form if the policy of
    the backend asks for it and the step computes its layers without a loop, with three exceptions:
    models without stacks have no separate form; Muon concatenates the matrices of all layers, so it
    keeps stacks; an optimizer state that is stored in the memory of the host keeps stacks, too.
    """
    mesh, policy = config.mesh, dispatch.policy()
    several = (mesh.data, mesh.fsdp, mesh.tensor, mesh.sequence) != (1, 1, 1, 1)
    return (
        (policy.separates_layers or (several and policy.shares_optimizer_state))
        and config.optimizer.name != "muon"
        and not config.optimizer.offload
        and tasks.from_config(config).unrolls_layers(config)
        and any(names[:1] == ("layers",) for names in parameter_axes(config).values())
    )


def separated(state: TrainState, axes: Axes) -> TrainState:
    """Converts a train state with stacks, or its shapes, to the separate form."""
    params = _separated_params(state.params, axes)
    return state._replace(params=params, optimizer=_separated_optimizer(state.optimizer))


def _separated_params(params: PyTree, axes: Axes) -> PyTree:
    flat = flatten_dict(params, sep="/")
    for path, leaf in flat.items():
        if axes.get(path, ())[:1] == ("layers",):
            flat[path] = [_layer(leaf, i) for i in range(len(leaf))]
    return unflatten_dict(flat, sep="/")


def _separated_optimizer(state: Any) -> Any:
    def separate(part: Any) -> Any:
        if not isinstance(part, LayerwiseState):
            return part
        stacked = {
            depth: [jax.tree.map(partial(_layer, i=i), states) for i in range(int(depth))]
            for depth, states in part.stacked.items()
        }
        return part._replace(stacked=stacked)

    return jax.tree.map(separate, state, is_leaf=lambda x: isinstance(x, LayerwiseState))


def _layer(x: Any, i: int) -> Any:
    """Returns layer i of a stack, or its shape and sharding."""
    if not isinstance(x, jax.ShapeDtypeStruct):
        return x[i]
    sharding = x.sharding
    if isinstance(sharding, NamedSharding):
        # The axis of layers is never sharded.
        spec = PartitionSpec(*sharding.spec[1:])
        sharding = NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
    return jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=sharding)


def stacked(tree: PyTree[Array]) -> PyTree[Array]:
    """Converts parameters, or an optimizer's state, of either form to the form with stacks."""

    def stack(part: Any) -> Any:
        if not isinstance(part, list):
            return part
        return jax.tree.map(lambda *layers: jnp.stack(layers), *part)

    return jax.tree.map(stack, tree, is_leaf=lambda x: isinstance(x, list))


def step_shapes(config: Config, shapes: TrainState, mesh: Mesh) -> TrainState:
    """Converts the shapes (with shardings) of a state with stacks to the form of the compiled step.

    If each replica holds a shard of the optimizer's state, the parameters in the separate form are
    sharded in the same way. The step then gathers the parameters at its beginning, in the dtype in
    which it computes, and can gather the parameters of a layer while it computes another layer.
    """
    if not separates(config):
        return shapes
    axes = parameter_axes(config)
    state = separated(shapes, axes)
    if not replicas.shards_optimizer(config.optimizer, mesh):
        return state

    def sharded(leaf: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    specs = replicas.optimizer_shards(state.params, axes, mesh)
    return state._replace(params=jax.tree.map(sharded, state.params, specs))


Conversion = Callable[[TrainState], TrainState]


def conversions(config: Config, shapes: TrainState, mesh: Mesh) -> tuple[Conversion, Conversion]:
    """Returns two conversions of a train state: to the form of the compiled step, and to stacks.

    A conversion deletes the arrays that it is given. Parameters and optimizer state are converted
    one after the other, so that a conversion needs no more memory than a step, which has gradients.
    """

    def separate(params: PyTree) -> PyTree:
        return _separated_params(params, parameter_axes(config))

    of_step = step_shapes(config, shapes, mesh)
    return (
        _conversion(separate, _separated_optimizer, of_step),
        _conversion(stacked, stacked, shapes),
    )


def _conversion(
    params: Callable[[PyTree], PyTree], optimizer: Callable[[PyTree], PyTree], result: TrainState
) -> Conversion:
    """Returns a function that converts a train state to the form of the shapes `result`.

    It converts the parameters with the function `params`, and the optimizer's state with the
    function `optimizer`. Both are compiled at the first call. A state that already has the form is
    returned unchanged.
    """
    structure: Any = jax.tree.structure(result.params)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, result)
    of_params = jax.jit(params, out_shardings=shardings.params, donate_argnums=0)
    of_optimizer = jax.jit(optimizer, out_shardings=shardings.optimizer, donate_argnums=0)

    def converted(state: TrainState) -> TrainState:
        if jax.tree.structure(state.params) == structure:
            return state
        params = _consumed(of_params, state.params)
        return state._replace(params=params, optimizer=_consumed(of_optimizer, state.optimizer))

    return converted


def _consumed(program: Callable[[PyTree], PyTree], tree: PyTree[Array]) -> PyTree[Array]:
    """Returns the result of a conversion, and deletes the arrays of its argument."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        result = program(tree)
    # Arrays that keep their shape were donated. Stacks, and layers that become stacks, cannot be
    # donated, because the result has arrays of other shapes. These arrays are deleted here.
    for leaf in jax.tree.leaves(tree):
        if not leaf.is_deleted():
            leaf.delete()
    return result
