"""Tests that a run gives the same results on any number of devices and along any axes of a mesh."""

import math
from collections.abc import Callable

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from model_settings import changed
from sharded_cases import CASES, MESHES, STEPS, curve, worst

from brt.config import Kernels, Mesh
from brt.errors import ConfigError
from brt.ops import dispatch
from brt.training import run as runs

TOLERANCE = 1e-5  # float32, for losses and states, relative to an array's largest magnitude
KERNEL_TOLERANCE = 5e-5  # for interpreted kernels compared with plain XLA, after all steps

QUICK = ("window", "data_sequence")  # The tests of all other cases are slow.
EACH = [
    pytest.param(
        name, mesh, id=f"{name}-{mesh}", marks=[] if (name, mesh) == QUICK else pytest.mark.slow
    )
    for name in CASES
    for mesh in MESHES
]


@pytest.mark.parametrize(("name", "mesh"), EACH)
def test_devices_that_share_a_run_equal_one(name: str, mesh: str, case: Callable) -> None:
    # AdamW compiles in three quarters of the time that Adafactor takes. The slow cases use
    # Adafactor.
    config, (nats, state) = case(name, "adamw" if (name, mesh) == QUICK else "adafactor")
    found, after = curve(config, MESHES[mesh], STEPS)
    assert worst(found, nats) < TOLERANCE
    assert worst(after.carry, state.carry) < TOLERANCE
    assert worst(after.model_state, state.model_state) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_replicas_with_shards_of_separate_layers_equal_one_device(
    name: str, case: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, (nats, state) = case(name, "adafactor")
    forms = {"separates_layers": True, "shares_optimizer_state": True}
    policies = {key: one._replace(**forms) for key, one in dispatch._POLICIES.items()}
    monkeypatch.setattr(dispatch, "_POLICIES", policies)
    found, after = curve(config, MESHES["data"], STEPS)
    assert any(isinstance(x, list) for x in flatten_dict(after.params).values())
    assert worst(found, nats) < TOLERANCE
    assert worst(after.carry, state.carry) < TOLERANCE
    assert worst(after.model_state, state.model_state) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("state", ["whole", "shared"])
def test_gradients_summed_in_bfloat16_are_near(state: str, case: Callable) -> None:
    config, (nats, _) = case("window", "adamw")
    config = changed(config, optimizer={"state": state})
    mesh = Mesh(data=8, gradient_dtype="bfloat16")
    found, _ = curve(config, mesh, STEPS)
    assert TOLERANCE < worst(found, nats) < 1e-2
    with pytest.raises(ConfigError, match="needs a model that learns nothing without gradients"):
        curve(case("routing")[0], mesh, 1)


@pytest.mark.slow
def test_what_is_learned_without_gradients_is_of_the_whole_batch(case: Callable) -> None:
    """A batch that is read in parts updates the model state only after its last part."""
    config, (nats, state) = case("routing")
    parts = changed(config, training={"gradient_accumulation": 2})
    found, after = curve(parts, Mesh(), STEPS)
    assert worst(found, nats) < TOLERANCE
    assert worst(after.model_state, state.model_state) < TOLERANCE
    moved = jax.tree.leaves(state.model_state)
    assert moved and all(map(np.any, moved[:2]))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("mesh", ["data_fsdp_tensor", "fsdp", "tensor"])
def test_meshes_give_equal_curves_with_every_optimizer(
    optimizer: str, mesh: str, case: Callable
) -> None:
    config, (nats, state) = case("recurrent", optimizer)
    found, after = curve(config, MESHES[mesh], STEPS)
    assert worst(found, nats) < TOLERANCE
    assert worst(after.carry, state.carry) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "mesh"),
    [("adafactor", "data"), ("adamw", "data"), ("adafactor", "data_sequence")],
)
def test_replicas_may_share_what_the_optimizer_remembers(
    optimizer: str, mesh: str, case: Callable
) -> None:
    config, (nats, state) = case("window", optimizer)
    config = changed(config, optimizer={"state": "shared"})
    found, after = curve(config, MESHES[mesh], STEPS)
    assert worst(found, nats) < TOLERANCE
    assert worst(after.params, state.params) < TOLERANCE
    run = runs.build(changed(config, mesh=MESHES[mesh]), progress=False)
    moments = [x for x in jax.tree.leaves(run.state_shapes.optimizer) if x.size > 512]
    assert moments and all(
        math.prod(x.sharding.shard_shape(x.shape)) * run.mesh.shape["data"] == x.size
        for x in moments
    )


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data_sequence", "data_fsdp_tensor", "fsdp", "tensor"])
@pytest.mark.parametrize("name", ["recurrent", "feedback"])
def test_what_tpus_run_equals_one_device(
    name: str, mesh: str, case: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs the kernels of TPUs, interpreted, without a loop over blocks, and with the weight
    gradients of a layer before those of the layers below.
    """
    config, (nats, state) = case(name)
    policy = dispatch.policy()._replace(ties_gradients=True)
    monkeypatch.setattr(dispatch, "policy", lambda: policy)
    operations = "window_attention", "recurrent_attention", "softmax_attention", "cross_entropy"
    kernels = Kernels(use=tuple(f"{name}=pallas_interpret" for name in operations))
    config = changed(config, model={"unroll": 8}, kernels=kernels)
    found, after = curve(config, MESHES[mesh], STEPS)
    assert worst(found, nats) < KERNEL_TOLERANCE
    assert worst(after.carry, state.carry) < KERNEL_TOLERANCE
