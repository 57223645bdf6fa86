"""Tests sweeps that train real models in real processes."""

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from brt.errors import BrtError

from .conftest import ROOT, Sweeps

pytestmark = pytest.mark.slow
GATES = "Recurrence.layers = (-1,)\nSweep.grid = {'Recurrence.gate': ('fixed', 'lstm')}\n"


@pytest.fixture(autouse=True)
def _compiled_once(sweeps: Sweeps, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes commands compile quickly and use the compilation cache."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    monkeypatch.delenv("JAX_ENABLE_COMPILATION_CACHE")


def rows() -> list[dict[str, str]]:
    """Returns the rows of the sweep's report."""
    with Path("out/report.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_point_that_diverges_is_recorded_and_the_other_is_finished(sweeps: Sweeps) -> None:
    sweeps.write("Sweep.grid = {'Optimizer.learning_rate': (1e37, 0.01)}")
    with pytest.raises(BrtError, match=r"1 of 2 points failed: learning_rate=1e\+37"):
        sweeps("--jobs=2")
    diverged, finished = rows()
    assert diverged["status"] == "failed" and diverged["reason"].startswith("diverged: step ")
    assert (finished["status"], finished["steps"]) == ("finished", "5")
    assert 0 < float(finished["bits_per_byte"]) < 20 and float(finished["step_seconds"]) > 0
    assert int(finished["parameters"]) - int(finished["parameters_non_embedding"]) == 256 * 16
    assert Path("out/plots/bits_against_step_time.png").exists()


def test_a_sweep_stopped_midway_and_started_again_repeats_nothing(sweeps: Sweeps) -> None:
    sweeps.write(GATES + "Training.steps = 400\n", run=_without("Training.steps"))
    command = [sys.executable, "-m", "brt.sweep", "--gin_file=sweep.gin", "--workdir=out"]
    first = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    metrics = Path("out/gate=lstm/metrics.jsonl")
    while not (metrics.exists() and metrics.stat().st_size > 1000):
        assert first.poll() is None
        time.sleep(0.1)
    os.kill(first.pid, signal.SIGTERM)
    _, said = first.communicate(timeout=120)
    assert first.returncode == 75 and "1 of 2 points are finished" in said
    finished = Path("out/gate=fixed/output.txt").read_text()
    again = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr
    assert Path("out/gate=fixed/output.txt").read_text() == finished
    assert "resuming out/gate=lstm from step " in Path("out/gate=lstm/output.txt").read_text()
    assert [(row["status"], row["steps"]) for row in rows()] == [("finished", "400")] * 2


def _without(name: str) -> str:
    """Returns the settings in RUN without those that begin with `name`."""
    from .conftest import RUN

    return "\n".join(line for line in RUN.splitlines() if not line.startswith(name)) + "\n"
