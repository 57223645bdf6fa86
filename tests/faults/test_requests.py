"""Tests that all processes of a run answer requests by files at the same step."""

import re
from pathlib import Path

import pytest

from brt.checkpointing import reader

from .harness import STEPS, Runs


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_files_in_the_run_directory_request_a_save_and_a_stop_after_evaluation(
    processes: int, tmp_path: Path
) -> None:
    own, workdir = Runs(tmp_path / "own", "language", processes), tmp_path / "run"
    workdir.mkdir()
    (workdir / "checkpoint_now").touch()
    (workdir / "stop_after_evaluation").touch()
    life = own.live(workdir, "Checkpoint.every = 1000")
    assert life.code == 75, life.said
    saved = int(re.search(r"checkpoint_now: step ([0-9]+) is saved", life.said)[1])
    assert "stop_after_evaluation: the run stops after the next evaluation" in life.said
    assert "stop_after_evaluation: step 4 is evaluated and saved" in life.said
    assert reader.steps(workdir / "checkpoints") == sorted({saved, 4})
    assert life.said.count("saved at step 4; run the same command again") == processes
    assert not (workdir / "checkpoint_now").exists()
    assert f"step {STEPS}/{STEPS}" in own.finish(workdir, 1).said
    own.assert_as_if_nothing_had_been(workdir)
