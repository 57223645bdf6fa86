"""Sharding rules: every axis of every array has a name, and a table maps names to mesh axes.

The code that creates an array names the array's axes; for parameters this is
`brt.layers.basic.parameter`. An axis is not sharded if its name is None, or if the number of
devices does not divide its size. The code calls a row of the batch a lane. The current mesh is the
mesh that the context `brt.distributed.mesh.use` has set for the traced code.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec
from jaxtyping import Array, Int, PyTree

from brt.errors import ConfigError

Names = tuple[str | None, ...]
Mesh = jax.sharding.Mesh | AbstractMesh

# Parameters are replicated along this axis of the mesh.
REPLICAS = "data"
# Inside of a `vmap` over an axis of this name, code sees the rows of one group (see `in_group`).
GROUPS = "groups"

# RULES maps the name of an array's axis to the axes of the mesh that shard it.
RULES: Mapping[str, tuple[str, ...]] = {
    # Rows of the batch are axis 0 of batches, activations, caches and states.
    "lanes": ("data", "fsdp"),
    "tokens": ("sequence",),
    "blocks": ("sequence",),
    # Only parameters have an axis called "embed"; the features of activations are not sharded.
    "embed": ("fsdp",),
    "heads": ("tensor",),
    # If the number of devices does not divide the number of heads of keys and values, every device
    # holds all of these heads.
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
    # The optimizer Muon stacks matrices of equal shape along a new axis, "matrices", and makes each
    # matrix orthogonal. Because the new axis is sharded, each device processes whole matrices.
    "matrices": ("fsdp", "tensor"),
} | dict.fromkeys(
    (
        "layers", "rank", "stack", "whole_heads", "head_dim", "states", "buckets", "positions",
        "types", "clusters", "experts",
    ),
    (),
)  # fmt: skip
# Along these axes, parameters of several layers or experts are stacked.
STACKS = ("layers", "experts")


def spec(names: Names, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """Returns the partition spec on `mesh` that RULES gives an array whose axes have these names.

    ValueError is raised if the same axis of the mesh would shard two axes of the array.
    """
    check_names(names, f"an array with the axes {names}")
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
    cut = tuple(axis for axis in RULES[name] if _devices(axis, mesh) > 1)
    return cut if size and size % math.prod(mesh.shape[axis] for axis in cut) == 0 else ()


def check_names(names: Names, shown: str) -> None:
    """Raises ConfigError if RULES lacks one of `names`; `shown` names the array in the message."""
    for name in names:
        if name is not None and name not in RULES:
            raise ConfigError(
                f"{shown} has an axis named {name!r}; the names of axes are "
                f"{', '.join(map(repr, RULES))}, and None for an axis that is never sharded"
            )


def parameter_spec(names: Names, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """Returns the partition spec of a parameter: `spec` for a matrix; vectors are replicated."""
    return spec(names, shape, mesh) if is_matrix(names) else PartitionSpec()


def is_matrix(names: Names) -> bool:
    """Returns True if a parameter with axes of these names is a matrix, False if it is a vector.

    The axes along which parameters are stacked (`STACKS`) are not counted.
    """
    return sum(name not in STACKS for name in names) > 1


def _devices(axis: str, mesh: Mesh) -> int:
    """Returns over how many devices along a mesh axis XLA partitions the traced code.

    The result is 1 if the code sees only the rows at one index of the axis. This is so for the
    manual axes of a `shard_map`, and for the axis REPLICAS inside of a group (`in_group`).
    """
    inside = axis in getattr(mesh, "manual_axes", ()) or (axis == REPLICAS and in_group())
    return 1 if inside else mesh.shape[axis]


def partitioned() -> bool:
    """Returns True if XLA partitions the traced code over several devices of the current mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return any(_devices(axis, mesh) > 1 for axis in mesh.shape)


def automatic_axes() -> frozenset[str]:
    """Returns the current mesh's axes over which XLA partitions the traced code.

    Inside of `shard_map`, these are the axes that are not manual.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return frozenset(mesh.axis_names) - frozenset(mesh.manual_axes)


def partition_spec(*names: str | None, shape: tuple[int, ...]) -> PartitionSpec:
    """Returns the `spec` of an array on the current mesh."""
    return spec(names, shape, jax.sharding.get_abstract_mesh())


def shard_count(name: str, size: int) -> int:
    """Returns the number of devices of the current mesh that shard an axis `name` of this size."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else math.prod(mesh.shape[axis] for axis in _cut(name, size, mesh))


def round_up(name: str, size: int) -> int:
    """Returns `size`, rounded up so that the current mesh can shard an axis `name` of this size."""
    mesh = jax.sharding.get_abstract_mesh()
    devices = 1 if mesh.empty else math.prod(_devices(axis, mesh) for axis in RULES[name])
    return -(-size // devices) * devices


def is_sharded(name: str) -> bool:
    """Returns True if an axis called `name` may be sharded over devices of the current mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and any(_devices(axis, mesh) > 1 for axis in RULES[name])


def can_merge_axes(axes: int) -> bool:
    """Returns True if merging an array's first `axes` axes surely moves no data between devices.

    The first of these axes is the rows of the batch; the names of the others are not known. There
    are two cases in which no data are moved:

    - The code is not partitioned.
    - At most two axes are merged, and the mesh shards no axis called "tokens", "embed" or "heads".
    """
    only_lanes = not any(map(is_sharded, ("tokens", "embed", "heads")))
    return not partitioned() or (axes <= 2 and only_lanes)


def in_replica() -> bool:
    """Returns True inside a `shard_map` over replicas, where code sees the rows of one replica."""
    return REPLICAS in jax.sharding.get_abstract_mesh().manual_axes


def in_group() -> bool:
    """Returns True in a `vmap` over groups; a group is the devices at one index along "data"."""
    try:
        jax.lax.axis_size(GROUPS)
    except NameError:
        return False
    return True


def lane_indices(count: int) -> Int[Array, " count"]:
    """Returns the indices in the global batch of the `count` rows that the code processes."""
    indices = jnp.arange(count)
    axis = REPLICAS if in_replica() else GROUPS if in_group() else None
    return indices + count * jax.lax.axis_index(axis) if axis else indices


def lane_keys(key: Array, count: int) -> Array:
    """Returns a random key for each of the `count` rows that the traced code processes.

    A key depends on the row's index in the global batch, but not on the number of rows or devices.
    """
    return jax.vmap(jax.random.fold_in, (None, 0))(key, lane_indices(count))


def constrain(x: Array, *names: str | None) -> Array:
    """Returns x, constrained to the sharding that RULES gives to axes of these names."""
    if not partitioned():
        return x
    return jax.lax.with_sharding_constraint(x, partition_spec(*names, shape=x.shape))


def gathered(x: Array, dtype: jnp.dtype, names: Names) -> Array:
    """Returns a parameter for a matrix product in `dtype`, gathered along axes called "embed"."""
    # A sharding constraint (`_whole`) makes XLA gather the parameter. Otherwise XLA may multiply
    # with the shards of the parameter one after the other, and move, add up and copy the partial
    # products, which takes longer than one product. The parameter is rounded to `dtype`, as the
    # product would do, then gathered, and returned in its own dtype. The gradient is not rounded.
    # It gets the same constraint, so that XLA computes the whole gradient in one product and sums
    # it over the devices once, instead of computing and summing it shard by shard.
    return _gathered(x, dtype, names) if is_sharded("embed") else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gathered(x: Array, dtype: jnp.dtype, names: Names) -> Array:
    return _whole(x.astype(dtype), names).astype(x.dtype)


def _whole(x: Array, names: Names) -> Array:
    return constrain(x, *(None if name == "embed" else name for name in names))


_gathered.defvjp(
    lambda x, dtype, names: (_gathered(x, dtype, names), None),
    lambda dtype, names, _, gradient: (_whole(gradient, names),),
)


def replicated(tree: PyTree[Array]) -> PyTree[Array]:
    """Constrains arrays to be replicated on all devices, so that every process can read them."""
    if not partitioned():
        return tree
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, PartitionSpec()), tree)


def jit(function: Callable[..., Any], **options: Any) -> Any:
    """Returns `jax.jit` of `function`, with its results `replicated`."""

    @functools.wraps(function)
    def replicated_function(*args: Any, **kwargs: Any) -> PyTree[Array]:
        return replicated(function(*args, **kwargs))

    return jax.jit(replicated_function, **options)
