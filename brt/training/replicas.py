"""Replicas: devices along `Mesh.data` that have whole models, and lanes of their own.

What is summed over lanes is computed by each of them as one device would, and added up once: left
to the compiler, every loop in which a parameter is used would reduce its gradient in every
iteration. Where devices share parameters (`Mesh.fsdp`, `Mesh.tensor`) it is left to the compiler,
which cannot cut a lookup inside of a replica (jax 0.10: it aborts).
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec
from jaxtyping import Array, PyTree

from brt.distributed import rules
from brt.distributed.rules import Names
from brt.ops import dispatch

_AXIS = rules.REPLICAS
LANES = PartitionSpec(_AXIS)  # of an array with lanes first


def number() -> int:
    """How many the mesh that is set has; 1 where devices share parameters."""
    shape = jax.sharding.get_abstract_mesh().shape
    shared = any(shape.get(axis, 1) > 1 for axis in ("fsdp", "tensor"))
    return 1 if shared else shape.get(_AXIS, 1)


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


def summed(tree: PyTree[Array]) -> PyTree[Array]:
    """The sums over the replicas.

    CPUs send every array by itself, and what that costs is waiting: there all go as one.
    """
    with jax.named_scope("replicas"):
        if dispatch.backend() != "cpu" or rules.partitioned():
            return jax.lax.psum(tree, _AXIS)
        flat, whole = ravel_pytree(tree)
        return whole(jax.lax.psum(flat, _AXIS))
