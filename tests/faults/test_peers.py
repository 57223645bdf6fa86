"""Tests that a process whose peer dies or hangs ends by itself and names the peer."""

from pathlib import Path

import pytest

from .harness import Runs


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("two"), "language", 2)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill", "stop"])
@pytest.mark.parametrize("process", [0, 1])
def test_a_peer_is_missed_and_nothing_is_lost(
    fault: str, process: int, two: Runs, tmp_path: Path
) -> None:
    """Process 0 runs the coordination service. If it is killed, JAX ends the other processes."""
    life = two.strike(tmp_path / "run", "stepping", fault, 2, process=process)
    assert life.struck
    assert "start all processes again" in life.said or (process, fault) == (0, "kill")
    if process == 1:
        assert "process 1 of 2 on " in life.said
    assert life.seconds_from_strike("start all processes again") < 45
    two.finish(tmp_path / "run")
    two.assert_as_if_nothing_had_been(tmp_path / "run")


@pytest.mark.slow
def test_a_peer_whose_step_hangs_ends_both(two: Runs, tmp_path: Path) -> None:
    """The watchdog has a time limit that is set by Training.watchdog_seconds, as users set it."""
    limit = "Training.watchdog_seconds = 60"
    life = two.strike(tmp_path / "run", "evaluating", "sleep", 1, limit, process=1)
    assert life.struck and life.code in (70, 75)
    assert "no sign of life for" in life.said and "while evaluating after step 4" in life.said
    assert "struck.py" in (tmp_path / "run/heartbeat/1.stacks.txt").read_text()
    two.finish(tmp_path / "run")
    two.assert_as_if_nothing_had_been(tmp_path / "run")
