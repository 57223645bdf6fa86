"""Tests that a stuck process ends and says where it is stuck, and that an active one does not."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from brt.training import watchdog
from brt.training.progress import PhaseTracker
from brt.training.watchdog import HUNG, watching

STUCK = """
import ctypes, sys, time
from pathlib import Path
from brt.training.progress import PhaseTracker
from brt.training.watchdog import watching

def in_python(): time.sleep(1000)
def with_pythons_lock(): ctypes.PyDLL(None).sleep(1000)

phases = PhaseTracker()
with watching(phases, 0.3, Path(sys.argv[2])):
    phases.enter("stepping", 7)
    globals()[sys.argv[1]]()
"""


def stuck(how: str, stacks: Path) -> tuple[int, str]:
    """Runs STUCK, which stops in the function `how`, and returns its exit code and stderr."""
    done = subprocess.run(
        [sys.executable, "-c", STUCK, how, str(stacks)], capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stderr


def test_who_is_stuck_ends_with_stacks_and_a_sentence(tmp_path: Path) -> None:
    stacks = tmp_path / "0.stacks.txt"
    code, said = stuck("in_python", stacks)
    assert code == HUNG == 70
    assert "brt: no sign of life for 0 s while stepping after step 7; the stacks are" in said
    assert "in in_python" in stacks.read_text() and "in in_python" in said


@pytest.mark.slow
def test_who_keeps_pythons_lock_ends_too(tmp_path: Path) -> None:
    code, said = stuck("with_pythons_lock", tmp_path / "none")
    assert code == 1 and "in with_pythons_lock" in said


@pytest.mark.slow
def test_signs_of_life_and_silent_phases_keep_it_quiet(tmp_path: Path) -> None:
    phases, stacks = PhaseTracker(), tmp_path / "0.stacks.txt"
    stacks.write_text("of a run before")
    with watching(phases, 0.4, stacks):
        phases.enter("compiling")
        time.sleep(0.45)  # A false alarm would end the process of the tests.
        phases.enter("stepping", 0)
        for step in range(5):
            time.sleep(0.1)
            phases.progressed(step)
    with watching(phases, 0.0, stacks):
        time.sleep(0.05)
    assert not stacks.exists()


def test_a_file_says_what_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "EVERY_SECONDS", 0.05)
    path, phases = tmp_path / "heartbeat" / "0.json", PhaseTracker()

    def told(phase: str, step: int, beside: str = "") -> bool:
        found = json.loads(path.read_text()) if path.exists() else {"phase": None}
        return (found["phase"], found.get("step"), found.get("beside")) == (phase, step, beside)

    def waited(phase: str, step: int, beside: str = "") -> None:
        end = time.monotonic() + 10
        while not told(phase, step, beside):
            assert time.monotonic() < end
            time.sleep(0.01)

    with watchdog.write_regularly(path, phases):
        waited("starting", 0)
        phases.enter("stepping", 5)
        waited("stepping", 5)
        phases.progressed(6)
        waited("stepping", 6)
        with phases.in_background("committing"):
            waited("stepping", 6, "committing")
    assert told("ended", 6)
    assert [file.name for file in path.parent.iterdir()] == ["0.json"], "no litter"


def test_a_file_that_cannot_be_written_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "heartbeat").write_text("in the way")
    with watchdog.write_regularly(tmp_path / "heartbeat" / "0.json", PhaseTracker()):
        pass
