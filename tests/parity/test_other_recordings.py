"""Tests that the comparisons read other recordings than those of the repository."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_directory_of_other_recordings_is_read(tmp_path: Path) -> None:
    recording = ROOT / "tests/data/golden/melodi_stack.npz"
    shutil.copy(recording, tmp_path / "melodi_stack_of_mine.npz")
    command = ["-m", "pytest", "--collect-only", "-q", "-m", "slow or not slow"]
    done = subprocess.run(
        [sys.executable, *command, f"--golden_dir={tmp_path}", "tests/parity"],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "melodi_stack_of_mine" in done.stdout
