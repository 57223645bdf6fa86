"""Tests that a test reads every recording of the original codes, and other recordings, too."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from recordings import PATTERNS

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests/data/golden"


def test_every_file_is_of_a_kind_that_is_read() -> None:
    prefixes = tuple(prefix for known in PATTERNS.values() for prefix in known)
    files = list(GOLDEN.rglob("*.npz"))
    assert len(files) > 20 and all(file.name.startswith(prefixes) for file in files)


@pytest.mark.slow
def test_a_directory_of_other_recordings_is_read(tmp_path: Path) -> None:
    shutil.copy(GOLDEN / "melodi_stack.npz", tmp_path / "melodi_stack_of_mine.npz")
    command = ["-m", "pytest", "--collect-only", "-q", "-m", "slow or not slow"]
    done = subprocess.run(
        [sys.executable, *command, f"--golden_dir={tmp_path}", "tests/parity"],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "melodi_stack_of_mine" in done.stdout
