"""Replicas: devices along `Mesh.data` that have whole models, and lanes of their own.

What is summed over lanes is computed by each of them as one device would, and added up once: left
to the compiler, every loop in which a parameter is used would reduce its gradient in every
iteration. Where devices share parameters (`Mesh.fsdp`, `Mesh.tensor`) it is left to the compiler,
which cannot cut a lookup inside of a replica (jax 0.10: it aborts).
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
LANES = PartitionSpec(_AXIS)  # of an array with lanes first
_SHARED = "embed", "mlp", "vocab"  # axes of which a replica may have a share


def number(mesh: rules.Mesh | None = None) -> int:
    """How many a mesh, or the one that is set, has; 1 where devices share parameters."""
    shape = (mesh or jax.sharding.get_abstract_mesh()).shape
    shared = any(shape.get(axis, 1) > 1 for axis in ("fsdp", "tensor"))
    return 1 if shared else shape.get(_AXIS, 1)


def share_state(optimizer: Optimizer, mesh: rules.Mesh | None = None) -> bool:
    """Whether there are several, and each has but a share of the optimizer's state (ZeRO's first
    stage: Rajbhandari et al. 2019), in a mesh or the one that is set. CPUs send every array by
    itself, which costs more than they would save."""
    if number(mesh) == 1:
        return False
    if optimizer.state == "auto":
        return dispatch.policy().shares_optimizer_state and optimizer.name != "muon"
    return optimizer.state == "shared"


def share(names: Names, shape: tuple[int, ...], replicas: int) -> PartitionSpec:
    """A replica's, of a parameter or a moment: of the first large axis that they divide."""
    for axis, name in enumerate(names):
        if name in _SHARED and rules.is_cut(names) and shape[axis] % replicas == 0:
            return PartitionSpec(*(None,) * axis, _AXIS)
    return PartitionSpec()


def optimizer_shards(params: PyTree[Array], axes: Mapping[str, Names]) -> PyTree[PartitionSpec]:
    """Of every parameter, by the names of its axes."""

    def of_leaf(path: tuple, leaf: Array) -> PartitionSpec:
        names = axes.get("/".join(key.key for key in path), ())
        return share(names, leaf.shape, number())

    return jax.tree.map_with_path(of_leaf, params)


def shared(tree: PyTree[Array], optimizer_shards: PyTree[PartitionSpec]) -> PyTree[Array]:
    """The same numbers, each where its share is."""
    return jax.tree.map(jax.lax.with_sharding_constraint, tree, optimizer_shards)


def lanes_of(tree: PyTree[Array], names: PyTree[Names]) -> PyTree[PartitionSpec]:
    """How replicas share arrays whose axes have these names."""

    def of_leaf(_: Array, names: Names) -> PartitionSpec:
        return PartitionSpec(*(_AXIS if name == "lanes" else None for name in names))

    return jax.tree.map(of_leaf, tree, names)


def each(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`function` of each replica's part; what it gives whole must be the same on all."""
    shape = jax.sharding.get_abstract_mesh().shape
    alone = {axis for axis, size in shape.items() if size == 1}  # else kernels would be refused
    return jax.shard_map(
        function, in_specs=in_specs, out_specs=out_specs, axis_names={_AXIS} | alone,
        check_vma=False,
    )  # fmt: skip


def summed(
    tree: PyTree[Array], optimizer_shards: PyTree[PartitionSpec] | None = None
) -> PyTree[Array]:
    """The sums over the replicas, or each one's share of them.

    CPUs send every array by itself, and what that costs is waiting: there all go as one.
    """
    with jax.named_scope("replicas"):
        if optimizer_shards is not None:
            return jax.tree.map(_sum_of_share, tree, optimizer_shards)
        if not dispatch.policy().sends_arrays_together or rules.partitioned():
            return jax.lax.psum(tree, _AXIS)
        flat, whole = ravel_pytree(tree)
        return whole(jax.lax.psum(flat, _AXIS))


def _sum_of_share(x: Array, share: PartitionSpec) -> Array:
    if not share:
        return jax.lax.psum(x, _AXIS)
    return jax.lax.psum_scatter(x, _AXIS, scatter_dimension=len(share) - 1, tiled=True)
