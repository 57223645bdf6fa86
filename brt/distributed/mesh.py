"""Builds the mesh of devices and places arrays on the mesh.

The mesh has the axes "data", "fsdp", "tensor" and "sequence". Every axis of an array has a name,
such as "heads". The table `RULES` in `brt.distributed.rules` maps this name to the axes of the mesh
over which the array's axis is sharded. The code calls a row of the batch a lane.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from brt.config import Mesh as MeshSettings
from brt.distributed import processes
from brt.distributed.rules import RULES
from brt.errors import ConfigError

# A mapping of this type lists sizes that must be divisible by the number of devices that shard
# them. It maps the name of an array's axis, as in RULES, to the name of a setting and the setting's
# value, for example {"heads": ("Model.heads", 8)}.
DivisibleSizes = Mapping[str, tuple[str, int]]

AXES = ("data", "fsdp", "tensor", "sequence")


def shape_of(mesh: MeshSettings, devices: int) -> dict[str, int]:
    """Returns a dictionary from each axis of the mesh to the number of devices along the axis.

    An axis whose setting is -1 gets all devices that remain after the other axes.
    """
    shape = {axis: getattr(mesh, axis) for axis in AXES}
    named = {axis: size for axis, size in shape.items() if size > 1}
    requested = " * ".join(f"Mesh.{axis} = {size}" for axis, size in named.items())
    wanted = math.prod(named.values())
    available = f"there {'is' if devices == 1 else 'are'} {devices}"
    if wanted > devices:
        raise ConfigError(f"{requested} needs {wanted} devices, but {available}; lower it")
    rest = [axis for axis, size in shape.items() if size == -1]
    if not rest:
        return shape
    if devices % wanted:
        raise ConfigError(
            f"{requested} does not divide {devices} devices, so Mesh.{rest[0]} = -1 has "
            f"none left; {nearest(wanted, devices)} would"
        )
    return shape | {rest[0]: devices // wanted}


def nearest(wanted: int, number: int) -> int:
    """Returns the divisor of `number` nearest to `wanted`; of two equally near, the smaller one."""
    return min((n for n in range(1, number + 1) if number % n == 0), key=lambda n: abs(n - wanted))


def build(
    mesh: MeshSettings, needs: DivisibleSizes, devices: Sequence[jax.Device] | None = None
) -> jax.sharding.Mesh:
    """Returns the mesh that the settings describe; it consists of the first ones of `devices`.

    If `devices` is None, it consists of the first ones of all devices. ConfigError is raised if the
    numbers of devices do not divide the sizes in `needs`.
    """
    devices = jax.devices() if devices is None else devices
    shape = shape_of(mesh, len(devices))
    if problem := describe_indivisible_size(shape, needs):
        raise ConfigError(problem)
    used = math.prod(shape.values())
    check_all_take_part(used, devices)
    slices = _slices(mesh.slices, shape, devices[:used])
    inner = (shape["data"] // len(slices), *list(shape.values())[1:])
    device_array = np.concatenate(
        [
            mesh_utils.create_device_mesh(inner, members, allow_split_physical_axes=True)
            for members in slices
        ]
    )
    return jax.sharding.Mesh(device_array, tuple(shape), axis_types=(AxisType.Auto,) * len(shape))


def _slices(
    count: int, shape: Mapping[str, int], devices: Sequence[jax.Device]
) -> list[list[jax.Device]]:
    """Returns the devices of each slice; there must be `count` slices (0: any number of slices).

    Devices that do not name their slice, such as CPUs, are divided into `count` slices of adjacent
    devices.
    """
    by_slice: dict[int, list[jax.Device]] = {}
    for device in devices:
        by_slice.setdefault(slice_of(device), []).append(device)
    slices = list(by_slice.values())
    if len(slices) == 1 and count > 1:
        size = len(devices) // count
        slices = [list(devices[i * size : (i + 1) * size]) for i in range(count)]
    if count and count != len(slices):
        raise ConfigError(
            f"Mesh.slices = {count}, but the {len(devices)} devices of the mesh belong to "
            f"{len(slices)} slices; Mesh.slices = 0 takes these"
        )
    if shape["data"] % len(slices) or len({len(members) for members in slices}) > 1:
        raise ConfigError(
            f"Mesh.data = {shape['data']} cannot be shared equally by {len(slices)} slices with "
            f"{', '.join(str(len(members)) for members in slices)} devices, which only data "
            f"parallelism may connect; Mesh.data = {len(slices)} and Mesh.fsdp = -1 would do"
        )
    return slices


def slice_of(device: Any) -> int:
    """Returns the index of the slice to which a TPU (`jax.Device`) belongs; 0 for other devices.

    The slice index of GPUs is ignored: XLA counts each host as a slice, although fast networks may
    connect the hosts.
    """
    is_tpu = getattr(device, "platform", "") == "tpu"
    return (getattr(device, "slice_index", None) or 0) if is_tpu else 0


def described(mesh: jax.sharding.Mesh) -> dict[str, int]:
    """Returns the number of devices along each axis of a mesh, and the number of slices.

    Checkpoints store these numbers. If a run resumes with other ones, it rounds differently.
    """
    return {**mesh.shape, "slices": len({slice_of(device) for device in mesh.devices.flat})}


def format_mesh(mesh: Mapping[str, int]) -> str:
    """Returns a mesh as text for people, such as "data 4 x tensor 2"."""
    return " x ".join(f"{axis} {n}" for axis, n in mesh.items() if n > 1) or "one device"


def describe_indivisible_size(shape: Mapping[str, int], needs: DivisibleSizes) -> str | None:
    """Returns an error message about a size in `needs` that devices cannot share equally, or None.

    `shape` maps each axis of the mesh to the number of devices along the axis.
    """
    for name, (what, size) in needs.items():
        over = {axis: shape[axis] for axis in RULES[name] if shape[axis] > 1}
        count = math.prod(over.values())
        if size % count:
            requested = " * ".join(f"Mesh.{axis} = {n}" for axis, n in over.items())
            return (
                f"{what} = {size} {name} cannot be shared equally by {requested} devices; "
                f"{nearest(count, size)} would do"
            )
    return None


def check_all_take_part(used: int, devices: Sequence[jax.Device]) -> None:
    """Raises ConfigError if there are several processes and the mesh leaves out devices."""
    count = len({device.process_index for device in devices})
    if count > 1 and used < len(devices):
        raise ConfigError(
            f"{count} processes have {len(devices)} devices, but the mesh uses only {used}; "
            "Mesh.data = -1 uses all"
        )


@contextlib.contextmanager
def use(mesh: jax.sharding.Mesh) -> Iterator[None]:
    """Context in which `mesh` is JAX's current mesh; a mesh of one device changes nothing."""
    with contextlib.nullcontext() if mesh.size == 1 else jax.set_mesh(mesh):
        yield


def replicated(mesh: jax.sharding.Mesh) -> NamedSharding:
    """Returns the sharding that gives every device of `mesh` a complete copy of an array."""
    return NamedSharding(mesh, PartitionSpec())


def place_like(tree: PyTree[Array], params: PyTree[Array]) -> PyTree[Array]:
    """Returns the arrays of `tree`, committed to the device of the parameters (`jax.device_put`).

    If the parameters are on several devices, `tree` is returned unchanged.
    """
    # The function prevents a second compilation. jax.jit compiles a program again if an argument
    # that was not committed to a device becomes committed. The initial state of a loop over
    # segments is not committed, but the state that the program returns for the next segment is
    # committed. Without this function, the loop would therefore compile its program twice.
    sharding = jax.tree.leaves(params)[0].sharding
    if sharding.num_devices > 1:
        return tree
    if isinstance(sharding, NamedSharding):
        sharding = replicated(sharding.mesh)
    return jax.device_put(tree, sharding)


def by_lane(mesh: jax.sharding.Mesh) -> NamedSharding:
    """Returns the sharding of arrays whose first axis is rows of the batch."""
    return NamedSharding(mesh, PartitionSpec(RULES["lanes"]))


def local_lanes(mesh: jax.sharding.Mesh, lanes: int) -> tuple[int, ...]:
    """Returns which of the `lanes` rows of the batch are on the devices of this process."""
    cuts = by_lane(mesh).addressable_devices_indices_map((lanes,)).values()
    return tuple(sorted({lane for cut in cuts if cut for lane in range(lanes)[cut[0]]}))


def global_array(
    mesh: jax.sharding.Mesh, x: np.ndarray, lane_indices: Sequence[int], lanes: int
) -> Array:
    """Returns the global array of `lanes` rows; every process passes the rows x that it has.

    `lane_indices` are the indices that the rows of x have in the global array.
    """
    row = {lane: place for place, lane in enumerate(lane_indices)}

    def rows_of_device(cut: tuple[slice, ...]) -> np.ndarray:
        return x[[row[lane] for lane in range(lanes)[cut[0]]]]

    return jax.make_array_from_callback((lanes, *x.shape[1:]), by_lane(mesh), rows_of_device)


def mesh_for_evaluation(mesh: MeshSettings, needs: DivisibleSizes) -> MeshSettings:
    """Returns the settings of a mesh with which this machine can evaluate a trained run.

    The result is the first of these meshes that the devices of this machine allow:

    - the mesh of the run, if no setting is -1
    - a mesh of all devices that shards the parameters as the run does; -1 is taken as 1
    - a mesh that shards the parameters over all devices of each slice
    - one device

    Of the sizes in `needs`, only the number of heads has to be divisible.
    """
    devices, slices = len(jax.devices()), len({slice_of(device) for device in jax.devices()})
    inner = {axis: max(getattr(mesh, axis), 1) for axis in AXES[1:]}
    count = math.prod(inner.values())
    candidates = [dataclasses.replace(mesh, slices=0)] if -1 not in vars(mesh).values() else []
    candidates += [MeshSettings(data=devices // count, **inner)] if devices % count == 0 else []
    if count > 1 or processes.several():
        candidates.append(MeshSettings(data=slices, fsdp=devices // slices))
    for candidate in candidates:
        shape = {axis: getattr(candidate, axis) for axis in AXES}
        used = math.prod(shape.values())
        needed = {name: need for name, need in needs.items() if name == "heads"}
        alone = not processes.several() and used <= devices
        if shape["data"] % slices:
            continue
        if (alone or used == devices) and not describe_indivisible_size(shape, needed):
            return candidate
    return MeshSettings()
