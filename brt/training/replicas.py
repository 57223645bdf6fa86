"""Data parallelism: replicas, the devices along `Mesh.data` that each hold a whole model.

Every replica computes the loss and the gradients of its own lanes as a single device would, and
one sum over the replicas (`psum`) follows. If this were left to the SPMD partitioner, every loop
that uses a parameter would reduce the parameter's gradient in every iteration.

If devices share parameters (`Mesh.fsdp`, `Mesh.tensor`), the partitioner has to do it all: it
cannot split an embedding lookup inside a replica (jax 0.10 aborts).
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
LANES = PartitionSpec(_AXIS)  # The spec of an array whose first axis is lanes (rows).
# The names of the axes along which optimizer states may be sharded.
_SHARDED = "embed", "mlp", "vocab"


def count(mesh: rules.Mesh | None = None) -> int:
    """Returns the number of replicas; 1 if devices share parameters.

    Args:
      mesh: the mesh; None for the mesh that is set.
    """
    shape = (mesh or jax.sharding.get_abstract_mesh()).shape
    shared = any(shape.get(axis, 1) > 1 for axis in ("fsdp", "tensor"))
    return 1 if shared else shape.get(_AXIS, 1)


def shards_optimizer(optimizer: Optimizer, mesh: rules.Mesh | None = None) -> bool:
    """Returns True if each replica holds only a shard of the optimizer's state.

    This is the first stage of ZeRO (Rajbhandari et al. 2019). By default it is not used on CPUs,
    which send every array separately, so that communication would cost more than is saved.

    Args:
      optimizer: settings; `state` is "auto", "shared" or "whole".
      mesh: the mesh; None for the mesh that is set.
    """
    if count(mesh) == 1:
        return False
    if optimizer.state == "auto":
        return dispatch.policy().shares_optimizer_state and optimizer.name != "muon"
    return optimizer.state == "shared"


def shard_spec(names: Names, shape: tuple[int, ...], replicas: int) -> PartitionSpec:
    """Returns the spec that shards a parameter, or an array of the optimizer, over replicas.

    The first large axis that the number of replicas divides is sharded; without one, the array is
    replicated.

    Args:
      names: names of the array's axes.
      shape: shape of the array.
      replicas: number of replicas.
    """
    for axis, name in enumerate(names):
        if name in _SHARDED and rules.is_matrix(names) and shape[axis] % replicas == 0:
            return PartitionSpec(*(None,) * axis, _AXIS)
    return PartitionSpec()


def optimizer_shards(params: PyTree[Array], axes: Mapping[str, Names]) -> PyTree[PartitionSpec]:
    """Returns the `shard_spec` of every parameter.

    Args:
      params: the parameters.
      axes: names of the parameters' axes, by path.
    """

    def spec_of(path: tuple, leaf: Array) -> PartitionSpec:
        """Returns the spec of a parameter."""
        names = axes.get("/".join(key.key for key in path), ())
        return shard_spec(names, leaf.shape, count())

    return jax.tree.map_with_path(spec_of, params)


def constrain(tree: PyTree[Array], specs: PyTree[PartitionSpec]) -> PyTree[Array]:
    """Returns the arrays of a tree with `with_sharding_constraint` applied to each."""
    return jax.tree.map(jax.lax.with_sharding_constraint, tree, specs)


def lane_specs(tree: PyTree[Array], names: PyTree[Names]) -> PyTree[PartitionSpec]:
    """Returns specs that shard the axis "lanes" of every array over the replicas.

    Args:
      tree: arrays of all lanes.
      names: names of the axes of each array.
    """

    def spec_of(_: Array, names: Names) -> PartitionSpec:
        """Returns the spec of an array with these names of axes."""
        return PartitionSpec(*(_AXIS if name == "lanes" else None for name in names))

    return jax.tree.map(spec_of, tree, names)


def shard_map(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Returns `jax.shard_map` of a function over the replicas.

    An output without the replicas' axis in its spec has to be the same on all replicas; this is
    not checked.
    """
    shape = jax.sharding.get_abstract_mesh().shape
    # Axes of size 1 are made manual, too, because jax refuses kernels inside a shard_map some of
    # whose axes are automatic.
    trivial = {axis for axis, size in shape.items() if size == 1}
    return jax.shard_map(
        function, in_specs=in_specs, out_specs=out_specs, axis_names={_AXIS} | trivial,
        check_vma=False,
    )  # fmt: skip


def psum(
    tree: PyTree[Array], optimizer_shards: PyTree[PartitionSpec] | None = None
) -> PyTree[Array]:
    """Returns the sum over the replicas of every array of a tree; called inside of `shard_map`.

    CPUs send every array separately and mostly wait, so on CPUs all arrays are sent as one.

    Args:
      tree: arrays of one replica.
      optimizer_shards: if given, each replica receives only its shard of every sum, by these specs.
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
