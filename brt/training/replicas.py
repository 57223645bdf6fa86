"""Data parallelism: replicas, the devices along `Mesh.data` that each hold a whole model.

Every replica computes the loss and the gradients of its own rows of the batch as a single device
would. One sum over the replicas (`psum`) follows. If XLA's SPMD partitioner distributed this
computation, every loop that uses a parameter would sum the parameter's gradient over the devices in
every iteration.

If parameters are sharded over devices (`Mesh.fsdp`, `Mesh.tensor`), the SPMD partitioner has to
distribute the whole computation, because it cannot partition an embedding lookup inside of a
`shard_map` over replicas (jax 0.10 aborts). Then `count` returns 1, and only the functions for
groups are used. A group is the devices at one index along `Mesh.data`, which together hold one
model. A mesh of None stands for JAX's current mesh.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec
from jaxtyping import Array, PyTree

from brt.config import Optimizer
from brt.distributed import rules
from brt.distributed.rules import Names
from brt.ops import dispatch

_AXIS = rules.REPLICAS
# This spec shards an array whose first axis is rows of the batch.
LANES = PartitionSpec(_AXIS)
# The optimizer's state may be sharded over the replicas along axes with these names.
_SHARDED = "embed", "mlp", "vocab"


def count(mesh: rules.Mesh | None = None) -> int:
    """Returns the number of replicas; 1 if parameters are sharded over devices."""
    shape = (mesh or jax.sharding.get_abstract_mesh()).shape
    shared = any(shape.get(axis, 1) > 1 for axis in ("fsdp", "tensor"))
    return 1 if shared else shape.get(_AXIS, 1)


def groups(mesh: rules.Mesh | None = None) -> int:
    """Returns the number of groups of devices: the number of devices along `Mesh.data`.

    Groups exist only if parameters are sharded over the devices of each group. If each device holds
    a whole model, the result is 1.
    """
    shape = (mesh or jax.sharding.get_abstract_mesh()).shape
    return shape.get(_AXIS, 1) if count(mesh) == 1 else 1


def in_groups(function: Callable[..., Any], in_axes: Any) -> Callable[..., Any]:
    """Returns `jax.vmap` of `function` over the groups; each group computes its own results."""
    return jax.vmap(function, in_axes, axis_name=rules.GROUPS, spmd_axis_name=_AXIS)


def zeros_in_groups(like: Array) -> Array:
    """Returns zeros [groups, *like.shape], to which each group adds arrays at its own index."""
    zeros = jnp.zeros((groups(), *like.shape), like.dtype)
    free = (PartitionSpec.UNCONSTRAINED,) * like.ndim
    return jax.lax.with_sharding_constraint(zeros, PartitionSpec(_AXIS, *free))


def shards_optimizer(optimizer: Optimizer, mesh: rules.Mesh | None = None) -> bool:
    """Returns True if each replica holds only a shard of the optimizer's state.

    This is the first stage of ZeRO (Rajbhandari et al. 2019). By default ("auto"), the state is not
    sharded with Muon or on CPUs: a CPU would send the shards of each array separately, which takes
    longer.
    """
    if count(mesh) == 1:
        return False
    if optimizer.state == "auto":
        return dispatch.policy().shares_optimizer_state and optimizer.name != "muon"
    return optimizer.state == "shared"


def shard_spec(names: Names, shape: tuple[int, ...], replicas: int) -> PartitionSpec:
    """Returns the spec that shards a parameter, or its optimizer state, over replicas.

    The first axis that is called "embed", "mlp" or "vocab", and whose size is a multiple of the
    number of replicas, is sharded. If the array has no such axis or is a vector, it is replicated.
    """
    for axis, name in enumerate(names):
        if name in _SHARDED and rules.is_matrix(names) and shape[axis] % replicas == 0:
            return PartitionSpec(*(None,) * axis, _AXIS)
    return PartitionSpec()


def optimizer_shards(
    params: PyTree, axes: Mapping[str, Names], mesh: rules.Mesh | None = None
) -> PyTree[PartitionSpec]:
    """Returns the `shard_spec` of each parameter; each replica updates one shard."""

    def parameter_shard_spec(path: tuple, parameter: Any) -> PartitionSpec:
        # In the separate form (`layer_forms`), a layer is an entry of a list. The names of its axes
        # are those of the stack without "layers".
        keys = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        names = axes.get("/".join(keys), ())[len(path) - len(keys) :]
        return shard_spec(names, parameter.shape, count(mesh))

    return jax.tree.map_with_path(parameter_shard_spec, params)


def constrain(tree: PyTree[Array], specs: PyTree[PartitionSpec]) -> PyTree[Array]:
    """Constrains each array to be sharded over the replicas as its spec says."""
    return jax.tree.map(jax.lax.with_sharding_constraint, tree, specs)


def lane_specs(tree: PyTree[Array], names: PyTree[Names]) -> PyTree[PartitionSpec]:
    """Returns specs that shard the axis "lanes" (rows of the batch) of each array over replicas.

    `names` has the names of the axes of each array.
    """

    def lane_spec(_: Array, names: Names) -> PartitionSpec:
        return PartitionSpec(*(_AXIS if name == "lanes" else None for name in names))

    return jax.tree.map(lane_spec, tree, names)


def shard_map(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Returns a function that runs `function` on every replica (`jax.shard_map`).

    An output that is not sharded over replicas has to be the same on all replicas; this is not
    checked.
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
    """Returns the sum over the replicas of every array of a tree, inside of `shard_map`.

    If `optimizer_shards` are given, each replica receives only its shard of every sum. CPUs send
    all arrays in one message, because the time of a message hardly depends on its size.
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
