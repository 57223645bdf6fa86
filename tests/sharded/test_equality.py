"""However many devices share a run, and along whatever axis, it is the same run."""

from collections.abc import Callable

import pytest
from sharded_cases import CASES, MESHES, STEPS, curve, worst

TOLERANCE = 1e-5  # float32: of losses, caches and states, relative to the largest of an array

QUICK = {("recurrent", "data_fsdp_tensor"), ("window", "data_sequence"), ("t5", "data_fsdp_tensor")}
EACH = [
    pytest.param(
        name, mesh, id=f"{name}-{mesh}", marks=[] if (name, mesh) in QUICK else pytest.mark.slow
    )
    for name in CASES
    for mesh in MESHES
]


@pytest.mark.parametrize(("name", "mesh"), EACH)
def test_devices_that_share_a_run_equal_one(name: str, mesh: str, case: Callable) -> None:
    config, (nats, state) = case(name)
    found, after = curve(config, MESHES[mesh], STEPS)
    assert worst(found, nats) < TOLERANCE
    assert worst(after.carry, state.carry) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("mesh", ["data_fsdp_tensor", "fsdp", "tensor"])
def test_whatever_the_optimizer(optimizer: str, mesh: str, case: Callable) -> None:
    config, (nats, state) = case("recurrent", optimizer)
    found, after = curve(config, MESHES[mesh], STEPS)
    assert worst(found, nats) < TOLERANCE
    assert worst(after.carry, state.carry) < TOLERANCE
