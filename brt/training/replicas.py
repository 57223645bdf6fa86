"""Data parallelism: replicas, the devices along `Mesh.data` that each hold a whole model.

Every replica computes the loss and the gradients of its own lanes (rows of the batch) as a single
device would. One sum over the replicas (`psum`) follows. If XLA's SPMD partitioner distributed this
computation, every loop that uses a parameter would sum the parameter's gradient over the devices in
every iteration.

If parameters are sharded over devices (`Mesh.fsdp`, `Mesh.tensor`), the SPMD partitioner has to
distribute the whole computation, because it cannot partition an embedding lookup inside of a
`shard_map` over replicas (jax 0.10 aborts). In this case `count` returns 1, and the other functions
are not used.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec
from jaxtyping import Array, PyTree

from brt.config import Optimizer
from brt.distributed import rules
from brt.distributed.rules import Names
from brt.ops import dispatch

_AXIS = rules.REPLICAS
# This spec shards an array whose first axis is lanes (rows of the batch).
LANES = PartitionSpec(_AXIS)
# The optimizer's state may be sharded over the replicas along axes with these names.
_SHARDED = "embed", "mlp", "vocab"


def count(mesh: rules.Mesh | None = None) -> int:
    """Returns the number of replicas; 1 if parameters are sharded over devices.

    Args:
      mesh: the mesh of devices; None for JAX's current mesh.
    """
    shape = (mesh or jax.sharding.get_abstract_mesh()).shape
    shared = any(shape.get(axis, 1) > 1 for axis in ("fsdp", "tensor"))
    return 1 if shared else shape.get(_AXIS, 1)


def shards_optimizer(optimizer: Optimizer, mesh: rules.Mesh | None = None) -> bool:
    """Returns True if each replica holds only a shard of the optimizer's state.

    Such sharding is the first stage of ZeRO (Rajbhandari et al. 2019). By default, the state is not
    sharded if the optimizer is Muon or the backend is a CPU. On CPUs the shards of each array would
    be sent separately, which would take more time than sharding saves.

    Args:
      optimizer: settings. Optimizer.state is "shared" for shards, "whole" for a copy of the whole
        state on each replica, or "auto" for the default of the backend.
      mesh: the mesh of devices; None for JAX's current mesh.
    """
    if count(mesh) == 1:
        return False
    if optimizer.state == "auto":
        return dispatch.policy().shares_optimizer_state and optimizer.name != "muon"
    return optimizer.state == "shared"


def shard_spec(names: Names, shape: tuple[int, ...], replicas: int) -> PartitionSpec:
    """Returns the partition spec that shards a parameter, or an array of the optimizer's state,
    over replicas.

    The first axis that is called "embed", "mlp" or "vocab", and whose size is a multiple of the
    number of replicas, is sharded. If the array has no such axis or is a vector, it is replicated.

    Args:
      names: names of the array's axes.
      shape: shape of the array.
      replicas: number of replicas.
    """
    for axis, name in enumerate(names):
        if name in _SHARDED and rules.is_matrix(names) and shape[axis] % replicas == 0:
            return PartitionSpec(*(None,) * axis, _AXIS)
    return PartitionSpec()


def optimizer_shards(
    params: PyTree, axes: Mapping[str, Names], mesh: rules.Mesh | None = None
) -> PyTree[PartitionSpec]:
    """Returns the partition specs by which replicas share the work of the optimizer: each replica
    updates one shard of each parameter.

    The specs are those of `shard_spec`, in a tree with the structure of `params`.

    Args:
      params: the parameters, or their shapes.
      axes: names of each parameter's axes, by the parameter's path.
      mesh: the mesh of devices; None for JAX's current mesh.
    """

    def parameter_shard_spec(path: tuple, parameter: Any) -> PartitionSpec:
        """Returns the `shard_spec` of one parameter, whose path in the tree is `path`.

        A layer of a stack is an entry of a list, and has the names of the stack without "layers".
        """
        keys = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        names = axes.get("/".join(keys), ())[len(path) - len(keys) :]
        return shard_spec(names, parameter.shape, count(mesh))

    return jax.tree.map_with_path(parameter_shard_spec, params)


def constrain(tree: PyTree[Array], specs: PyTree[PartitionSpec]) -> PyTree[Array]:
    """Returns the arrays of a tree, each constrained to a sharding over the replicas by
    `jax.lax.with_sharding_constraint`.

    Args:
      tree: arrays.
      specs: the spec of each array, in a tree of the same structure.
    """
    return jax.tree.map(jax.lax.with_sharding_constraint, tree, specs)


def gathered(tree: PyTree[Array]) -> PyTree[Array]:
    """Returns the arrays of a tree, each constrained to be whole on every device."""
    whole = PartitionSpec()
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, whole), tree)


def lane_specs(tree: PyTree[Array], names: PyTree[Names]) -> PyTree[PartitionSpec]:
    """Returns specs that shard the axis "lanes" of every array over the replicas.

    Args:
      tree: arrays of all lanes.
      names: names of the axes of each array, in a tree whose leaves are tuples of names.
    """

    def lane_spec(_: Array, names: Names) -> PartitionSpec:
        """Returns the spec of an array whose axes are called `names`."""
        return PartitionSpec(*(_AXIS if name == "lanes" else None for name in names))

    return jax.tree.map(lane_spec, tree, names)


def shard_map(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Returns a function that runs `function` on every replica (`jax.shard_map`).

    An output whose spec lacks the replicas' axis of the mesh has to be the same on all replicas,
    which is not checked.

    Args:
      function: the function, which each replica calls with its shards of the arguments.
      in_specs: partition specs of the arguments, or tree prefixes of these specs.
      out_specs: partition specs of the outputs, or tree prefixes of these specs.
    """
    shape = jax.sharding.get_abstract_mesh().shape
    # The axes of size 1 are manual axes of the shard_map, too, because jax refuses Pallas kernels
    # inside of a shard_map that has automatic axes.
    trivial = {axis for axis, size in shape.items() if size == 1}
    return jax.shard_map(
        function, in_specs=in_specs, out_specs=out_specs, axis_names={_AXIS} | trivial,
        check_vma=False,
    )  # fmt: skip


def psum(
    tree: PyTree[Array], optimizer_shards: PyTree[PartitionSpec] | None = None
) -> PyTree[Array]:
    """Returns the sum over the replicas of every array of a tree. The function has to be called
    inside of `shard_map`.

    On CPUs, where the time of a message hardly depends on its size, whole sums are computed with
    one message: all arrays are concatenated first.

    Args:
      tree: arrays of one replica.
      optimizer_shards: partition spec of each array; each replica receives only its shard of every
        sum. None if each replica receives the whole sums.
    """
    with jax.named_scope("replicas"):
        if optimizer_shards is not None:
            return jax.tree.map(_psum_shard, tree, optimizer_shards)
        if not dispatch.policy().sends_arrays_together or rules.partitioned():
            return jax.lax.psum(tree, _AXIS)
        flat, unravel = ravel_pytree(tree)
        return unravel(jax.lax.psum(flat, _AXIS))


def _psum_shard(x: Array, spec: PartitionSpec) -> Array:
    if not spec:
        return jax.lax.psum(x, _AXIS)
    return jax.lax.psum_scatter(x, _AXIS, scatter_dimension=len(spec) - 1, tiled=True)
