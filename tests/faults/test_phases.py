"""Tests that a run equals an undisturbed one after any fault in any phase, once it is done.

The cases are the product of phases, faults, tasks and numbers of processes.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from buckets import BucketServer

from .harness import PHASES, TASKS, BucketRuns, Runs, small_disk


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, int], Runs]]:
    """Returns the runs of a task and a number of processes, which are created when first used."""

    class Made(dict):
        def __missing__(self, key: tuple[str, int]) -> Runs:
            self[key] = Runs(tmp_path_factory.mktemp("-".join(map(str, key))), *key)
            return self[key]

    return Made()


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("fault", ["kill", "terminate", "interrupt", "hang"])
def test_a_fault_in_every_phase_changes_nothing(
    fault: str, task: str, processes: int, runs: dict[tuple[str, int], Runs], tmp_path: Path
) -> None:
    """Each start is struck in the next phase; with two processes, the second one is struck."""
    own, workdir = runs[task, processes], tmp_path / "run"
    for phase, count in PHASES.items():
        # Only the first process commits.
        own.strike(workdir, phase, fault, count, process=(phase != "committing") * (processes - 1))
    own.finish(workdir)
    own.assert_as_if_nothing_had_been(workdir)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_a_kill_in_every_phase_of_a_run_in_a_bucket_changes_nothing(
    scheme: str, processes: int, tmp_path: Path
) -> None:
    with BucketServer() as server:
        own, workdir = BucketRuns(tmp_path, "language", processes, server, scheme), tmp_path / "run"
        for phase, count in PHASES.items():
            own.strike(workdir, phase, "kill", count, process=0)
        own.finish(workdir)
        own.assert_as_if_nothing_had_been(workdir)


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("phase", PHASES)
def test_a_full_disk_in_every_phase_changes_nothing(
    phase: str, task: str, runs: dict[tuple[str, int], Runs], tmp_path: Path
) -> None:
    own, disk = runs[task, 1], tmp_path / "disk"
    take_away = small_disk(disk)
    if take_away is None:
        pytest.skip("needs the right to mount a file system")
    try:
        if phase in ("restoring", "seeking"):
            own.strike(disk / "run", "evaluating", "terminate")
        life = own.strike(disk / "run", phase, "full", PHASES[phase])
        assert life.struck
        if life.code:
            assert "brt: error: " in life.said and re.search("disk is full|room", life.said)
        (disk / "filler").unlink()
        own.finish(disk / "run")
        own.assert_as_if_nothing_had_been(disk / "run")
    finally:
        take_away()
