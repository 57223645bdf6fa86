"""Tests launch/slurm/train.sh, which passes Slurm's signal on to the run and requeues the job."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "launch/slurm/train.sh"
SHELLCHECK = Path(sys.executable).with_name("shellcheck")


def tool(directory: Path, name: str, body: str) -> None:
    """Writes a shell script that replaces the program with this name."""
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(f"#!/bin/bash\n{body}\n")
    (directory / name).chmod(0o755)


@pytest.mark.slow_cases("[01]")
@pytest.mark.parametrize("code", [0, 1, 75])
def test_a_job_passes_the_signal_on_and_queues_itself_again(code: int, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tool(tools, "scontrol", 'echo "$@" > requeued')
    tool(
        tools, "python",
        f'echo "$@" > started; trap "sleep 0.2; exit {code}" TERM; sleep 0.1; kill -TERM "$PPID"; '
        "for i in {1..100}; do sleep 0.05; done; exit 9",
    )  # fmt: skip
    environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
    done = subprocess.run(
        ["bash", str(SCRIPT), "--gin_file=a b.gin"], env=environment, cwd=tmp_path
    )
    assert done.returncode == code
    assert (tmp_path / "started").read_text() == "-m brt.train --gin_file=a b.gin\n"
    assert (tmp_path / "requeued").exists() == (code == 75)
    if code == 75:
        assert (tmp_path / "requeued").read_text() == "requeue 17\n"


def test_the_readme_names_the_slurm_script() -> None:
    assert "sbatch train.sh" in (SCRIPT.parent / "README.md").read_text()


@pytest.mark.skipif(not SHELLCHECK.exists(), reason="shellcheck is not installed")
def test_shellcheck_finds_no_fault_in_the_slurm_script() -> None:
    subprocess.run([SHELLCHECK, *map(str, SCRIPT.parent.glob("*.sh"))], check=True)
