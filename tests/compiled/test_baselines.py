"""Compares the compiled cost of each part of a step with a recorded baseline."""

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BASELINES = sorted((ROOT / "tools/benchmark/baselines").glob("*.json"))


def here(name: str) -> str:
    """Returns the installed version of a package."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


@pytest.mark.slow
@pytest.mark.parametrize("file", BASELINES, ids=lambda file: file.stem)
def test_no_part_costs_more_than_it_did(file: Path) -> None:
    for name, number in json.loads(file.read_text())["versions"].items():
        if here(name) != number:
            pytest.skip(f"{file.name} is of {name} {number}, and here is {here(name)}")
    flag = f"--baseline={file.relative_to(ROOT)}"
    command = [sys.executable, "tools/benchmark/compiled.py", flag]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
