"""Tests that a task in a single user file, a toy, works with all commands and the Python API."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from brt import api, config_from_gin, tasks
from brt.checkpointing import reader
from brt.errors import CheckpointError
from brt.training import evaluations, inspection, loop, run_summary, saved_model
from brt.training.workdir import Workdir

ROOT = Path(__file__).parents[2]
TASK = ROOT / "tests/data/user_files/my_task.py"
SETTINGS = {
    "Training.task": "parity", "Training.steps": 300, "Training.batch_size": 64,
    "Training.segment_length": 4, "Training.log_every": 50, "Training.evaluate_every": 150,
    "Training.sample_every": 300, "Optimizer.name": "adamw", "Optimizer.learning_rate": 0.05,
    "Optimizer.schedule": "constant", "Optimizer.warmup_steps": 5, "Checkpoint.every": 100,
}  # fmt: skip
PARITY = {"0110": 0, "1000": 1, "1110": 1, "0000": 0}
SWEEP = "Sweep.base = 'parity.gin'\nSweep.grid = {'Training.seed': (0, 1)}\n"
KILLED = """
import itertools, os, signal
from brt.training import run
calls, put = itertools.count(1), run.put
def killing(*given):
    if next(calls) == 250:
        os.kill(os.getpid(), signal.SIGKILL)
    return put(*given)
run.put = killing
"""


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers the toy task for one test."""
    monkeypatch.setattr(tasks, "TASKS", dict(tasks.TASKS))
    exec(TASK.read_text(), {"__name__": "toy"})


@pytest.mark.usefixtures("toy")
def test_a_toy_task_is_trained_evaluated_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = {"Training.plots": False, "Checkpoint.every": 150}
    run, workdir = loop.train(config_from_gin((), SETTINGS | quick), tmp_path)
    assert "validation: 0.0" in run_summary.finish(run, workdir, 0.0)
    place, found, theirs = saved_model.load_config(tmp_path)
    model = saved_model.load(place, found, theirs)
    evaluated = evaluations.evaluate(model, "test", None)
    assert evaluated.report["bits_per_row"] < 0.1, "parity is learned"
    writer = api.Model(model)
    for bits, parity in PARITY.items():
        assert writer.generate(bits, temperature=0.0) == f"{bits}{parity}"


@pytest.mark.slow  # Quick tests of checkpoints show that what is read is hashed.
@pytest.mark.usefixtures("toy")
def test_weights_are_hashed_once_and_not_needed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint is hashed when it is read: to resume a run, or to start another run from it."""
    hashed: list[Path] = []
    verify = reader.manifest.verify

    def counted(directory: Path, **selected: object) -> list[str]:
        hashed.append(directory)
        return verify(directory, **selected)

    def train(name: str, steps: int, start: str = "") -> None:
        changes = {"evaluate_every": 0, "sample_every": 0, "plots": False, "steps": steps}
        changes |= {"init_from": start}
        given = {f"Training.{setting}": value for setting, value in changes.items()}
        hashed.clear()
        loop.train(config_from_gin((), SETTINGS | given), tmp_path / name)

    train("first", steps=20)
    monkeypatch.setattr(reader.manifest, "verify", counted)
    first = str(tmp_path / "first")
    train("second", steps=10, start=first)
    assert hashed.count(tmp_path / "first/checkpoints/20") == 1
    shutil.rmtree(first)
    train("second", steps=20, start=first)
    assert hashed.count(tmp_path / "second/checkpoints/10") == 1
    assert reader.steps(tmp_path / "second/checkpoints") == [10, 20]
    with pytest.raises(CheckpointError, match="first.: there is no such directory"):
        train("third", steps=10, start=first)


class Commands:
    """Runs brt's commands as processes, which import the toy task from a user's file."""

    def __init__(self, directory: Path):
        self.directory, self.killed = directory, directory / "killed.py"
        self.killed.write_text(TASK.read_text() + KILLED)
        bindings = [f"{name} = {value!r}" for name, value in SETTINGS.items()]
        (directory / "parity.gin").write_text("\n".join(bindings))
        (directory / "sweep.gin").write_text(SWEEP)

    def __call__(self, name: str, *flags: str, task: Path = TASK, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", f"brt.{name}", f"--import={task}", *flags], cwd=self.directory,
            text=True, capture_output=True, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=300,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr * (code > 0)


@pytest.fixture
def commands(tmp_path: Path) -> Callable[..., str]:
    return Commands(tmp_path)


@pytest.mark.slow
def test_all_commands_know_a_toy_task(commands: Commands, tmp_path: Path) -> None:
    train = "train", "--gin_file=parity.gin"
    assert "bits per row" in commands(*train, "--workdir=whole")
    commands(*train, "--workdir=cut", task=commands.killed, code=-signal.SIGKILL)
    assert 100 in (left := reader.steps(tmp_path / "cut/checkpoints")) and 300 not in left
    commands(*train, "--workdir=cut")
    hashes = [commands("inspect", f"--workdir={name}", "--state_hash") for name in ("whole", "cut")]
    assert hashes[0] == hashes[1] == inspection.state_hash(Workdir(tmp_path / "whole"), 300) + "\n"
    assert "eval/validation/bits_per_row" in commands("inspect", "--workdir=whole")
    said = commands("inspect", "--workdir=whole", "--probe", code=2)
    assert "--probe is for language models" in said

    commands("evaluate", "--workdir=whole", "--json=report.json")
    assert json.loads((tmp_path / "report.json").read_text())["bits_per_row"] < 0.1
    for bits, parity in PARITY.items():
        given = "--workdir=whole", f"--prompt={bits}", "--temperature=0"
        assert commands("generate", *given) == f"{bits}{parity}\n"
    assert (tmp_path / "whole/samples/00000300.txt").exists()

    table = commands("sweep", "--gin_file=sweep.gin", "--workdir=sweep")
    assert "bits per row" in table
    rows = (tmp_path / "sweep/report.csv").read_text().splitlines()[1:]
    assert len(rows) == 2 and all("finished" in row for row in rows)
    assert (tmp_path / "sweep/plots/bits.png").exists()
    refused = "--gin_bindings=Training.task = 'partiy'"
    said = commands(*train, "--workdir=none", refused, code=2)
    assert "'parity'" in said and "did you mean" in said
