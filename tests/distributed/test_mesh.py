from types import SimpleNamespace

import jax
import pytest

from brt.config import Mesh
from brt.distributed import mesh as meshes
from brt.distributed.mesh import build, local_lanes, mesh_for_evaluation, shape_of
from brt.errors import ConfigError

LANES = {"lanes": ("Training.batch_size / Training.gradient_accumulation", 12)}


def test_a_mesh_takes_the_first_devices() -> None:
    mesh = build(Mesh(data=4), {})
    assert dict(mesh.shape) == {"data": 4, "fsdp": 1, "tensor": 1, "sequence": 1}
    assert list(mesh.devices.flat) == jax.devices()[:4]


def test_only_data_crosses_slices() -> None:
    """Devices that do not say to which slice they belong are divided in their order."""
    mesh = build(Mesh(data=4, fsdp=2, slices=2), {})
    for part, devices in (
        (mesh.devices[:2], jax.devices()[:4]),
        (mesh.devices[2:], jax.devices()[4:]),
    ):
        assert {*part.flat} == {*devices}


def test_devices_say_to_which_slice_they_belong(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = jax.devices()[:4]
    monkeypatch.setattr(meshes, "slice_of", lambda device: device.id % 2)
    mesh = build(Mesh(data=2, fsdp=2), {}, devices)
    assert [[d.id % 2 for d in row.flat] for row in mesh.devices] == [[0, 0], [1, 1]]
    with pytest.raises(ConfigError, match=r"^Mesh.slices = 4, but .* 2 slices; Mesh.slices = 0"):
        build(Mesh(data=4, slices=4), {}, devices)
    with pytest.raises(ConfigError, match=r"^Mesh.data = 1 .* by 2 slices .* Mesh.data = 2 and"):
        build(Mesh(fsdp=4), {}, devices)


def test_hosts_with_gpus_are_no_slices() -> None:
    numbers = [meshes.slice_of(SimpleNamespace(platform=p, slice_index=1)) for p in ("tpu", "gpu")]
    assert numbers == [1, 0]


def test_one_axis_takes_what_the_others_leave() -> None:
    assert shape_of(Mesh(data=-1, tensor=2), 8)["data"] == 4
    with pytest.raises(ConfigError, match=r"Mesh.data and Mesh.fsdp are both -1"):
        Mesh(data=-1, fsdp=-1)
    with pytest.raises(ConfigError, match=r"gradient_dtype = 'bfloat16' needs Mesh.fsdp = 1"):
        Mesh(fsdp=-1, gradient_dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"^Mesh.tensor = 3 does not divide 8 devices.* 2 would"):
        shape_of(Mesh(data=-1, tensor=3), 8)


@pytest.mark.parametrize(
    ("mesh", "needs", "message"),
    [
        (Mesh(data=9), {}, r"^Mesh.data = 9 needs 9 devices, but there are 8; lower it"),
        (
            Mesh(data=2, fsdp=4), LANES,
            r"gradient_accumulation = 12 lanes cannot be shared equally by Mesh.data = 2 \* "
            r"Mesh.fsdp = 4 devices; 6 would do$",
        ),
        (
            Mesh(tensor=8), {"heads": ("Model.heads", 12)},
            r"^Model.heads = 12 heads cannot be shared equally by Mesh.tensor = 8 devices; 6 would",
        ),
        (
            Mesh(sequence=3), {"blocks": ("Training.segment_length / Model.window", 8)},
            r"^Training.segment_length / Model.window = 8 blocks cannot be .* Mesh.sequence = 3 "
            r"devices; 2 would do$",
        ),
    ],
)  # fmt: skip
def test_what_devices_do_not_divide_is_refused(mesh: Mesh, needs: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(mesh, needs)


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^Mesh.fsdp = 0 must be above 0, or -1$"):
        Mesh(fsdp=0)


@pytest.mark.parametrize(
    ("trained", "expected"),
    [
        (Mesh(), Mesh()),
        (Mesh(data=2, fsdp=2, tensor=2), Mesh(data=2, fsdp=2, tensor=2)),
        (Mesh(data=16, tensor=4), Mesh(data=2, tensor=4)),
        (Mesh(data=16, fsdp=16), Mesh(fsdp=8)),
        (Mesh(data=-1), Mesh(data=8)),
    ],
)
def test_a_trained_model_is_read_by_what_devices_there_are(trained: Mesh, expected: Mesh) -> None:
    assert mesh_for_evaluation(trained, {"heads": ("Model.heads", 8)}) == expected


def test_lanes_of_a_process_are_those_of_its_devices() -> None:
    mesh = build(Mesh(data=2, fsdp=2, tensor=2), {})
    assert local_lanes(mesh, 8) == tuple(range(8))
