"""What lies where: every axis of every array has a name, and this table says what cuts it.

Parameters carry their names (`brt.layers.basic.parameter`); batches, activations, caches and
states name theirs where they are made. An axis that its devices do not divide stays whole.
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

REPLICAS = "data"  # along which parameters are the same, and lanes are dealt with apart

# The axes of the mesh that cut an axis of this name.
RULES: Mapping[str, tuple[str, ...]] = {
    "lanes": ("data", "fsdp"),  # of batches, activations, caches and states
    "tokens": ("sequence",),
    "blocks": ("sequence",),
    "embed": ("fsdp",),  # of parameters; activations have it whole
    "heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
    "matrices": ("fsdp", "tensor"),  # that Muon makes orthogonal, each on one device
} | dict.fromkeys(
    (
        "layers", "stack", "whole_heads", "head_dim", "states", "buckets", "positions", "types",
        "clusters",
    ),
    (),
)  # fmt: skip


def spec(names: Names, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """How an array is cut.

    Raises:
      ValueError: a name that is not in the table, or two axes that the same devices would cut.
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
    """How a parameter is cut: vectors, of a layer or of all layers of a stack, are not."""
    return spec(names, shape, mesh) if is_cut(names) else PartitionSpec()


def is_cut(names: Names) -> bool:
    """Whether a parameter is no vector."""
    return sum(name != "layers" for name in names) > 1


def _devices(axis: str, mesh: Mesh) -> int:
    """Along an axis of a mesh; of replicas, which are traced each by itself, there is one."""
    return 1 if axis in getattr(mesh, "manual_axes", ()) else mesh.shape[axis]


def partitioned() -> bool:
    """Whether what is traced runs on several devices, where merging axes may move data."""
    mesh = jax.sharding.get_abstract_mesh()
    return any(_devices(axis, mesh) > 1 for axis in mesh.shape)


def axes() -> frozenset[str]:
    """Of the mesh that is set, along which what is traced is not of one device yet."""
    mesh = jax.sharding.get_abstract_mesh()
    return frozenset(mesh.axis_names) - frozenset(mesh.manual_axes)


def partition_spec(*names: str | None, shape: tuple[int, ...]) -> PartitionSpec:
    """How an array is cut by the mesh that is set."""
    return spec(names, shape, jax.sharding.get_abstract_mesh())


def count(name: str, size: int) -> int:
    """How many devices share an axis of this name and size, where the mesh that is set is."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else math.prod(mesh.shape[axis] for axis in _cut(name, size, mesh))


def filled(name: str, size: int) -> int:
    """The next size that the devices of the mesh that is set divide."""
    mesh = jax.sharding.get_abstract_mesh()
    devices = 1 if mesh.empty else math.prod(_devices(axis, mesh) for axis in RULES[name])
    return -(-size // devices) * devices


def cuts(name: str) -> bool:
    """Whether the mesh that is set cuts axes of this name."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and any(_devices(axis, mesh) > 1 for axis in RULES[name])


def rows_adjoin(axes: int) -> bool:
    """Whether the first so many axes of an array can be merged where they are: lanes come first,
    and nothing behind them is cut. Where devices share more than lanes the compiler decides."""
    only_lanes = not any(map(cuts, ("tokens", "embed", "heads")))
    return not partitioned() or (axes <= 2 and only_lanes)


def in_replica() -> bool:
    """Whether what is traced is of one of several replicas (`brt.training.replicas`)."""
    return REPLICAS in jax.sharding.get_abstract_mesh().manual_axes


def rows(count: int) -> Int[Array, " count"]:
    """The numbers, in the whole batch, of the `count` lanes that are here."""
    here = jnp.arange(count)
    return here + count * jax.lax.axis_index(REPLICAS) if in_replica() else here


def row_keys(key: Array, count: int) -> Array:
    """Keys of these rows, whoever else is in the batch, and on however many devices."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, rows(count))


def constrain(x: Array, *names: str | None) -> Array:
    """`x`, cut by its names where a mesh of several devices is set (`jax.set_mesh`)."""
    if not partitioned():
        return x
    return jax.lax.with_sharding_constraint(x, partition_spec(*names, shape=x.shape))


def replicated(tree: PyTree[Array]) -> PyTree[Array]:
    """Arrays that every device is to have whole, so that every process can read them."""
    if not partitioned():
        return tree
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, PartitionSpec()), tree)


def jit(function: Callable[..., Any], **options: Any) -> Any:
    """`jax.jit` of a function whose results are `replicated`."""

    @functools.wraps(function)
    def whole(*args: Any, **kwargs: Any) -> PyTree[Array]:
        return replicated(function(*args, **kwargs))

    return jax.jit(whole, **options)
