"""Tests that a second trainer in a workdir is refused, and that a dead trainer's lock is not."""

from pathlib import Path

import pytest

from .harness import Runs


@pytest.mark.slow
def test_a_second_trainer_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    own, workdir = Runs(tmp_path / "own", "language"), tmp_path / "run"
    first = own.start(workdir, strike=("evaluating", 1, "stop"))
    assert any("struck: evaluating" in line for line in first.stdout)
    second = own.live(workdir)
    assert second.code == 2 and "is in use by another trainer (process " in second.said
    first.kill()
    first.communicate()
    assert "taking over from a trainer that was killed" in own.finish(workdir).said
    own.assert_as_if_nothing_had_been(workdir)
