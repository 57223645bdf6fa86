"""Sharding rules: every axis of every array has a name, and a table maps names to mesh axes.

The names of a parameter's axes are given where it is created (`brt.layers.basic.parameter`); those
of batches, activations, caches and states where they are made. An axis is not sharded if the
number of devices does not divide its size.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec
from jaxtyping import Array, Int, PyTree

Names = tuple[str | None, ...]
Mesh = jax.sharding.Mesh | AbstractMesh

REPLICAS = "data"  # the mesh axis along which parameters are replicated

# The mesh axes that shard an array's axis of this name.
RULES: Mapping[str, tuple[str, ...]] = {
    "lanes": ("data", "fsdp"),  # axis 0 of batches, activations, caches and states
    "tokens": ("sequence",),
    "blocks": ("sequence",),
    "embed": ("fsdp",),  # an axis of parameters; activations do not shard it
    "heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
    "matrices": ("fsdp", "tensor"),  # matrices that Muon orthogonalises, each on one device
} | dict.fromkeys(
    (
        "layers", "stack", "whole_heads", "head_dim", "states", "buckets", "positions", "types",
        "clusters",
    ),
    (),
)  # fmt: skip


def spec(names: Names, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """Returns the partition spec of an array.

    Args:
      names: the names of the array's axes; None is never sharded.
      shape: the shape of the array.
      mesh: the mesh.

    Raises:
      ValueError: a name is not in the table, or the same mesh axis would shard two axes.
    """
    if len(names) != len(shape):
        raise ValueError(f"{names} does not name the axes of an array of shape {shape}")
    cuts = [_cut(name, size, mesh) for name, size in zip(names, shape, strict=True)]
    used = [axis for cut in cuts for axis in cut]
    if len(set(used)) < len(used):
        raise ValueError(f"the axes {names} collide: one of the mesh would cut two of them")
    return PartitionSpec(*(cut if len(cut) > 1 else cut[0] if cut else None for cut in cuts))


def _cut(name: str | None, size: int, mesh: Mesh) -> tuple[str, ...]:
    if name is None:
        return ()
    if name not in RULES:
        raise ValueError(f"no rule says what cuts axes named {name!r}; add it to RULES")
    cut = tuple(axis for axis in RULES[name] if _devices(axis, mesh) > 1)
    return cut if size and size % math.prod(mesh.shape[axis] for axis in cut) == 0 else ()


def parameter_spec(names: Names, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """Returns the partition spec of a parameter; vectors are replicated."""
    return spec(names, shape, mesh) if is_matrix(names) else PartitionSpec()


def is_matrix(names: Names) -> bool:
    """Returns True for matrices, False for vectors (also those of all layers of a stack)."""
    return sum(name != "layers" for name in names) > 1


def _devices(axis: str, mesh: Mesh) -> int:
    """Returns the number of devices along a mesh axis, or 1 inside a replica (see `in_replica`)."""
    return 1 if axis in getattr(mesh, "manual_axes", ()) else mesh.shape[axis]


def partitioned() -> bool:
    """Returns True if the traced code runs on several devices, where merging axes may move data."""
    mesh = jax.sharding.get_abstract_mesh()
    return any(_devices(axis, mesh) > 1 for axis in mesh.shape)


def automatic_axes() -> frozenset[str]:
    """Returns the axes of the current mesh over which the traced code is still partitioned."""
    mesh = jax.sharding.get_abstract_mesh()
    return frozenset(mesh.axis_names) - frozenset(mesh.manual_axes)


def partition_spec(*names: str | None, shape: tuple[int, ...]) -> PartitionSpec:
    """Returns the partition spec of an array on the current mesh."""
    return spec(names, shape, jax.sharding.get_abstract_mesh())


def shard_count(name: str, size: int) -> int:
    """Returns the number of devices of the current mesh that shard an axis."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else math.prod(mesh.shape[axis] for axis in _cut(name, size, mesh))


def round_up(name: str, size: int) -> int:
    """Rounds a size up to a multiple of the devices of the current mesh that shard the axis."""
    mesh = jax.sharding.get_abstract_mesh()
    devices = 1 if mesh.empty else math.prod(_devices(axis, mesh) for axis in RULES[name])
    return -(-size // devices) * devices


def is_sharded(name: str) -> bool:
    """Returns True if the current mesh shards axes of this name."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and any(_devices(axis, mesh) > 1 for axis in RULES[name])


def can_merge_axes(axes: int) -> bool:
    """Returns True if the first `axes` axes of an array can be merged without moving data.

    The first axis is the lanes. If other axes are sharded, too, the compiler decides.
    """
    only_lanes = not any(map(is_sharded, ("tokens", "embed", "heads")))
    return not partitioned() or (axes <= 2 and only_lanes)


def in_replica() -> bool:
    """Returns True if the traced code belongs to one replica (see `brt.training.replicas`)."""
    return REPLICAS in jax.sharding.get_abstract_mesh().manual_axes


def lane_indices(count: int) -> Int[Array, " count"]:
    """Returns the indices, in the whole batch, of the `count` lanes of the traced code."""
    here = jnp.arange(count)
    return here + count * jax.lax.axis_index(REPLICAS) if in_replica() else here


def lane_keys(key: Array, count: int) -> Array:
    """Returns a random key per lane, which does not depend on the batch or on the devices."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, lane_indices(count))


def constrain(x: Array, *names: str | None) -> Array:
    """Applies the sharding constraint of the axes' names, if the current mesh has many devices."""
    if not partitioned():
        return x
    return jax.lax.with_sharding_constraint(x, partition_spec(*names, shape=x.shape))


def replicated(tree: PyTree[Array]) -> PyTree[Array]:
    """Constrains arrays to be replicated, so that every process can read them."""
    if not partitioned():
        return tree
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, PartitionSpec()), tree)


def jit(function: Callable[..., Any], **options: Any) -> Any:
    """Like `jax.jit`, for a function whose results every process must be able to read."""

    @functools.wraps(function)
    def whole(*args: Any, **kwargs: Any) -> PyTree[Array]:
        return replicated(function(*args, **kwargs))

    return jax.jit(whole, **options)
