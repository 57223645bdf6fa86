"""Tests that a run resumes at its newest checkpoint, and at no earlier one without a message."""

import shutil
from pathlib import Path

import jax.numpy as jnp
import pytest

from brt.checkpointing.writer import CheckpointWriter
from brt.errors import CheckpointError
from brt.training import saved_model
from brt.training.workdir import Workdir

META = {
    "seed": 0, "data": {"step": 5}, "config": {}, "tokenizer": "a",
    "meter": {
        "tokens_seen": 9, "steps": 0, "nats": 0.0, "tokens": 0.0, "norms": 0.0, "others": {},
    },
}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Workdir:
    """Returns the directory of a run that was saved at steps 5 and 10."""
    workdir = Workdir(tmp_path / "run")
    workdir.path.mkdir()
    with CheckpointWriter(workdir.checkpoints) as writer:
        for step in (5, 10):
            writer.save(step, {"w": jnp.ones(2)}, META)
    return workdir


def newest(run: Workdir) -> int | None:
    found = saved_model.newest_checkpoint(run.path)
    return found and found.step


def test_the_newest_or_none_before_the_first(run: Workdir, tmp_path: Path) -> None:
    assert newest(run) == 10
    assert newest(Workdir(tmp_path / "new")) is None


@pytest.mark.parametrize("how", ["away", "another name", "one by one", "a link to nowhere"])
def test_a_run_whose_checkpoints_are_gone_does_not_begin_again(run: Workdir, how: str) -> None:
    if how == "one by one":
        for path in run.checkpoints.iterdir():
            shutil.rmtree(path)
    else:
        run.checkpoints.rename(run.path / "elsewhere")
    if how == "a link to nowhere":
        run.checkpoints.symlink_to("nowhere")
    elif how == "another name":
        run.checkpoints.mkdir()
    with pytest.raises(
        CheckpointError, match=r"run was saved at step 10, but .*; put the checkpoints back"
    ):
        saved_model.newest_checkpoint(run.path)


def test_going_back_to_an_older_one_is_said(
    run: Workdir, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(run.checkpoints / "10")
    assert newest(run) == 5
    assert f"checkpoint 10 is gone from {run.checkpoints}; using 5" in capsys.readouterr().err
