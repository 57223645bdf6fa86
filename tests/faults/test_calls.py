"""Tests that failing calls of the file system lose nothing and end with a clear error.

A few cases are drawn at random; `make soak` tries all of them (see calls.py).
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from . import calls


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    found = calls.build(tmp_path_factory.mktemp("library"))
    if found is None:
        pytest.skip("this machine is not Linux, or has no C compiler")
    return found


def test_the_nth_call_below_a_directory_fails_and_no_other(library, tmp_path):
    """Each kind of call fails once, or from then on, with its error; a short write writes half."""
    (tmp_path / "own").mkdir()
    script = Path(__file__).with_name("strike_calls.py")
    environment = os.environ | {"LD_PRELOAD": str(library), calls.LIBRARY: str(library)}
    command = [sys.executable, str(script), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("commands", "every"),
    [("train", 80), ("prepare,generate,export,import", 25), ("evaluate", 25)],
)
def test_nothing_is_lost_where_a_call_fails(library, commands, every):
    arguments = [f"--commands={commands}", f"--every={every}", f"--seed={os.getpid()}"]
    done = calls.start(arguments, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 failed" in done.stdout
