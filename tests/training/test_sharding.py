import jax
import pytest

from brt.config import Mesh
from brt.errors import ConfigError
from brt.training.sharding import make_mesh


def test_a_mesh_takes_the_first_devices() -> None:
    mesh = make_mesh(Mesh(data=4))
    assert dict(mesh.shape) == {"data": 4, "fsdp": 1, "tensor": 1, "sequence": 1}
    assert list(mesh.devices.flat) == jax.devices()[:4]


def test_more_devices_than_there_are_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^Mesh.data = 9 asks for 9 devices, but there are 8"):
        make_mesh(Mesh(data=9))
