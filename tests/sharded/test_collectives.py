"""Tests the collectives of a train step: none of them reshards an array along another axis."""

from pathlib import Path

import jax
import pytest
from model_settings import changed
from sharded_cases import CASES, factored, with_optimizer

from brt.config import Mesh
from brt.planning.compiled import costs
from brt.training import run as runs

RESHARDING = {"all-to-all", "collective-permute"}
NAMES = ("window", "recurrent", "recurrent_dual", "recurrent_single", "feedback", "clustered", "t5")
MESHES = (Mesh(tensor=4), Mesh(data=8), Mesh(fsdp=8), Mesh(data=2, fsdp=2, tensor=2))


def lowered(
    name: str, mesh: Mesh, place: Path, state: str = "auto", optimizer: str = "adafactor"
) -> jax.stages.Lowered:
    """Returns the lowered train step of a case. `state` is the setting Optimizer.state."""
    config = with_optimizer(CASES[name](place), optimizer, 8)
    config = changed(config, mesh=mesh, optimizer={"state": state})
    with factored():
        run = runs.build(config, progress=False)
    return runs.lowered_step(run.config, run, run.reader.largest())


def compiled(name: str, mesh: Mesh, place: Path, optimizer: str = "adafactor") -> str:
    return lowered(name, mesh, place, optimizer=optimizer).compile().as_text()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_sent_to_be_cut_another_way(name: str, mesh: Mesh, tmp_path: Path) -> None:
    found = costs(compiled(name, mesh, tmp_path)).collectives
    assert found and not RESHARDING & found.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["recurrent", "feedback", "t5"])
def test_replicas_add_up_once(name: str, tmp_path: Path) -> None:
    """One all-reduce of a step sums all arrays, instead of one in each block or layer."""
    found = costs(compiled(name, Mesh(data=8), tmp_path)).collectives
    assert {kind: count for kind, (count, _) in found.items()} == {"all-reduce": 1}


@pytest.mark.slow_cases("whole-True", "shared-*")
@pytest.mark.parametrize(("state", "taken_over"), [("whole", True), ("shared", False)])
def test_what_replicas_gather_does_not_take_the_old_parameters_place(
    state: str, taken_over: bool, tmp_path: Path
) -> None:
    """Parameters are not donated if replicas share the optimizer's state, because the gathered
    parameters would be copied into their memory. All other arrays are donated.
    """
    params, others, *_ = lowered("window", Mesh(data=8), tmp_path, state).args_info[0]
    assert {leaf.donated for leaf in jax.tree.leaves(params)} == {taken_over}
    assert all(leaf.donated for leaf in jax.tree.leaves(others))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tensor", "optimizer"), [("window", 2, "adafactor"), ("recurrent", 1, "adamw")]
)
def test_devices_that_share_a_segment_send_one_window_to_their_neighbour(
    name: str, tensor: int, optimizer: str, tmp_path: Path
) -> None:
    """Each of the two layers sends keys and values, forward and backward.

    The optimizer exchanges nothing, and devices that share heads send those of their own.
    """
    mesh = Mesh(sequence=4, tensor=tensor)
    found = costs(compiled(name, mesh, tmp_path, optimizer)).collectives
    # lanes x tokens x heads of a device x channels of a head x bytes of a number
    window = 8 * 4 * (8 // tensor) * 4 * 4
    assert found["collective-permute"] == (8, 8 * window)
    assert "all-to-all" not in found
