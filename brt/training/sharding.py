"""Devices as a mesh, and what lies where on it.

Lanes are spread over `data`; parameters and optimizer state are on every device.
"""

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from brt.config import Mesh
from brt.errors import ConfigError
from brt.training.state import TrainState


def make_mesh(mesh: Mesh) -> jax.sharding.Mesh:
    """The mesh of the first devices.

    Raises:
      ConfigError: more devices asked for than there are.
    """
    shape = {"data": mesh.data, "fsdp": mesh.fsdp, "tensor": mesh.tensor, "sequence": mesh.sequence}
    wanted, devices = int(np.prod(list(shape.values()))), jax.devices()
    if wanted > len(devices):
        axes = " * ".join(f"Mesh.{name} = {size}" for name, size in shape.items() if size > 1)
        raise ConfigError(
            f"{axes} asks for {wanted} devices, but there are {len(devices)} "
            f"({devices[0].platform}); lower it"
        )
    return jax.make_mesh(
        tuple(shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape),
        devices=devices[:wanted],
    )  # fmt: skip


def replicated(mesh: jax.sharding.Mesh) -> NamedSharding:
    """The same on every device."""
    return NamedSharding(mesh, PartitionSpec())


def by_lane(mesh: jax.sharding.Mesh) -> NamedSharding:
    """Axis 0, the lanes, over `data`."""
    return NamedSharding(mesh, PartitionSpec("data"))


def state_shardings(mesh: jax.sharding.Mesh, state: TrainState) -> TrainState:
    """The sharding of every leaf of a train state."""

    def everywhere(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda _: replicated(mesh), tree)

    return TrainState(
        step=replicated(mesh),
        params=everywhere(state.params),
        optimizer=everywhere(state.optimizer),
        carry=jax.tree.map(lambda _: by_lane(mesh), state.carry),
        model_state=everywhere(state.model_state),
    )
