"""The devices of a run as a mesh with four axes."""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from brt.config import Mesh
from brt.distributed import processes
from brt.distributed.rules import RULES
from brt.errors import ConfigError

# By the name of an axis of arrays, as in RULES: what it is to people, and its size.
Needs = Mapping[str, tuple[str, int]]

AXES = ("data", "fsdp", "tensor", "sequence")


def shape_of(mesh: Mesh, devices: int) -> dict[str, int]:
    """Devices along each axis; -1 is what the others leave.

    Raises:
      ConfigError: they are more than there are, or leave a remainder.
    """
    shape = {axis: getattr(mesh, axis) for axis in AXES}
    named = {axis: size for axis, size in shape.items() if size > 1}
    asked = " * ".join(f"Mesh.{axis} = {size}" for axis, size in named.items())
    wanted = math.prod(named.values())
    there = f"there {'is' if devices == 1 else 'are'} {devices}"
    if wanted > devices:
        raise ConfigError(f"{asked} asks for {wanted} devices, but {there}; lower it")
    rest = [axis for axis, size in shape.items() if size == -1]
    if not rest:
        return shape
    if devices % wanted:
        raise ConfigError(
            f"{asked} does not divide {devices} devices, so Mesh.{rest[0]} = -1 has "
            f"none left; {nearest(wanted, devices)} would"
        )
    return shape | {rest[0]: devices // wanted}


def nearest(wanted: int, whole: int) -> int:
    """The divisor of `whole` that is nearest to `wanted`, the smaller of two."""
    return min((n for n in range(1, whole + 1) if whole % n == 0), key=lambda n: abs(n - wanted))


def build(
    mesh: Mesh, needs: Needs, devices: Sequence[jax.Device] | None = None
) -> jax.sharding.Mesh:
    """The mesh of the first devices.

    Args:
      needs: what the devices that cut it must divide.

    Raises:
      ConfigError: devices that are not there, or do not divide what they are to share.
    """
    devices = jax.devices() if devices is None else devices
    shape = shape_of(mesh, len(devices))
    if problem := misfit(shape, needs):
        raise ConfigError(problem)
    used = math.prod(shape.values())
    check_all_take_part(used, devices)
    partition_spec = mesh_utils.create_device_mesh(
        tuple(shape.values()), devices[:used], allow_split_physical_axes=True
    )
    return jax.sharding.Mesh(partition_spec, tuple(shape), axis_types=(AxisType.Auto,) * len(shape))


def misfit(shape: Mapping[str, int], needs: Needs) -> str | None:
    """What devices along the axes of a mesh do not divide, None: they divide all."""
    for name, (what, size) in needs.items():
        over = {axis: shape[axis] for axis in RULES[name] if shape[axis] > 1}
        count = math.prod(over.values())
        if size % count:
            asked = " * ".join(f"Mesh.{axis} = {n}" for axis, n in over.items())
            return (
                f"{what} = {size} {name} cannot be shared equally by {asked} devices; "
                f"{nearest(count, size)} would do"
            )
    return None


def check_all_take_part(used: int, devices: Sequence[jax.Device]) -> None:
    """Raises ConfigError where a process would have no device of the mesh, or only some."""
    count = len({device.process_index for device in devices})
    if count > 1 and used < len(devices):
        raise ConfigError(
            f"{count} processes have {len(devices)} devices, of which the mesh takes "
            f"{used}; Mesh.data = -1 takes all"
        )


@contextlib.contextmanager
def use(mesh: jax.sharding.Mesh) -> Iterator[None]:
    """What is traced within knows the mesh; one device needs none."""
    with contextlib.nullcontext() if mesh.size == 1 else jax.set_mesh(mesh):
        yield


def replicated(mesh: jax.sharding.Mesh) -> NamedSharding:
    """The same on every device."""
    return NamedSharding(mesh, PartitionSpec())


def beside(tree: PyTree[Array], params: PyTree[Array]) -> PyTree[Array]:
    """Puts fresh arrays where the parameters are, if one device has these.

    A state that has read nothing is not bound to a device, but the one that a program returns is.
    jax.jit compiles once more for arguments that are placed in another way: without this a loop
    over segments would compile its program twice.
    """
    sharding = jax.tree.leaves(params)[0].sharding
    if sharding.num_devices > 1:
        return tree
    if isinstance(sharding, NamedSharding):
        sharding = replicated(sharding.mesh)
    return jax.device_put(tree, sharding)


def by_lane(mesh: jax.sharding.Mesh) -> NamedSharding:
    """Axis 0, the lanes, over the devices that share them."""
    return NamedSharding(mesh, PartitionSpec(RULES["lanes"]))


def own_lanes(mesh: jax.sharding.Mesh, lanes: int) -> tuple[int, ...]:
    """Which of the lanes this process's devices have."""
    cuts = by_lane(mesh).addressable_devices_indices_map((lanes,)).values()
    return tuple(sorted({lane for cut in cuts if cut for lane in range(lanes)[cut[0]]}))


def global_array(mesh: jax.sharding.Mesh, x: np.ndarray, own: Sequence[int], lanes: int) -> Array:
    """One array of all processes' lanes, of which `x` holds those of this one."""
    row = {lane: place for place, lane in enumerate(own)}

    def part(cut: tuple[slice, ...]) -> np.ndarray:
        return x[[row[lane] for lane in range(lanes)[cut[0]]]]

    return jax.make_array_from_callback((lanes, *x.shape[1:]), by_lane(mesh), part)


def fitting(mesh: Mesh, needs: Needs) -> Mesh:
    """A trained run's mesh, or what these devices can be of it: parameters are shared alike where
    that is possible, and by none or by all where it is not."""
    devices = len(jax.devices())
    inner = {axis: max(getattr(mesh, axis), 1) for axis in AXES[1:]}
    count = math.prod(inner.values())
    candidates = [mesh] if -1 not in vars(mesh).values() else []
    candidates += [Mesh(data=devices // count, **inner)] if devices % count == 0 else []
    candidates += [Mesh(fsdp=devices)] if count > 1 or processes.several() else []
    for candidate in candidates:
        shape = {axis: getattr(candidate, axis) for axis in AXES}
        used = math.prod(shape.values())
        needed = {name: need for name, need in needs.items() if name == "heads"}
        alone = not processes.several() and used <= devices
        if (alone or used == devices) and not misfit(shape, needed):
            return candidate
    return Mesh()
