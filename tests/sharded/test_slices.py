"""Tests that a run goes on with another number of slices, and how often gradients cross slices."""

import json
import shutil
from pathlib import Path

import jax
import pytest
from model_settings import changed
from sharded_cases import CASES, with_optimizer, worst

import brt
from brt.config import Checkpoint, Config, Mesh

ROUNDING = "devices add up numbers in another order"
HALF, STEPS = 2, 4


def results(config: Config, mesh: Mesh, path: Path) -> tuple[list[float], list]:
    """Trains, or continues, a run; returns the losses of all steps and the final parameters."""
    model = brt.train(changed(config, mesh=mesh), path)
    lines = map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    return losses, jax.device_get(jax.tree.leaves(model.params))


@pytest.fixture(scope="module")
def two_slices(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Path, tuple]:
    """A run on two slices: its config, its directory, and its `results`."""
    place = tmp_path_factory.mktemp("slices")
    training = {
        "batch_size": 16, "gradient_accumulation": 2, "log_every": 1, "evaluate_every": 0,
        "sample_every": 0, "probe_every": 0, "plots": False,
    }  # fmt: skip
    # Checkpoints do not have the settings of kinds of layers that the model lacks.
    config = changed(
        with_optimizer(CASES["window"](place), "adamw", STEPS),
        model={"kinds": ()}, training=training,
        checkpoint=Checkpoint(every=HALF, keep=2),
    )  # fmt: skip
    return config, place / "run", results(config, Mesh(data=4, fsdp=2, slices=2), place / "run")


@pytest.mark.slow  # Quick tests show that meshes compute the same, and that a resumed run goes on.
@pytest.mark.parametrize(
    ("mesh", "equal"),
    [
        (Mesh(data=4, fsdp=2), True),
        (Mesh(data=4, fsdp=2, slices=4), True),
        (Mesh(data=2, fsdp=4), False),
    ],
)
def test_a_run_goes_on_with_another_number_of_slices(
    mesh: Mesh, equal: bool, two_slices: tuple, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Devices without fast links compute the same; another mesh rounds in another way, and says
    so.
    """
    config, run, (losses, params) = two_slices
    shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints" / str(STEPS))
    found, after = results(config, mesh, tmp_path / "run")
    assert (ROUNDING in capsys.readouterr().err) == (not equal)
    assert len(found) == STEPS
    if equal:
        assert found == losses and worst(after, params) == 0
    else:
        assert worst(found, losses) < 1e-5 and worst(after, params) < 1e-4
