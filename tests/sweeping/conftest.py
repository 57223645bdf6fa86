"""Fixtures that run sweeps in temporary directories, with or without real training."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from brt import sweep
from brt.errors import BrtError

ROOT = Path(__file__).resolve().parent.parent.parent
RUN = """
Model.layers = 2
Model.model_dim = 16
Model.heads = 2
Model.head_dim = 8
Model.mlp_dim = 16
Model.window = 8
Recurrence.states = 8
Training.steps = 5
Training.batch_size = 2
Training.segment_length = 16
Training.log_every = 1
Training.evaluate_every = 0
Training.sample_every = 0
Training.plots = False
Optimizer.name = 'adamw'
Optimizer.learning_rate = 0.01
Optimizer.warmup_steps = 1
Checkpoint.every = 0
Data.train = 'train.txt'
Data.validation = 'validation.txt'
Data.test = 'test.txt'
"""
# Replaces brt.train and brt.evaluate: notes the start, runs the script of the point, and succeeds.
COMMAND = """
import os, pathlib, signal, sys, time
flags = dict(flag.lstrip("-").split("=", 1) for flag in sys.argv[1:])
workdir, name = pathlib.Path(flags["workdir"]), pathlib.Path(sys.argv[0]).stem
with open("starts.txt", "a") as file:
    print(name, workdir.name, file=file)
script = pathlib.Path(f"{workdir.name}.py")
if script.exists():
    exec(script.read_text())
if name == "train":  # in as many steps as an epoch may have
    (workdir / "checkpoints/5").mkdir(parents=True, exist_ok=True)
    (workdir / "checkpoints/5/MANIFEST.sha256").touch()
    (workdir / "checkpoints/5/meta.json").write_text('{"step": 5, "arrays": {}}')
if name == "evaluate":
    (workdir / "evaluations/5").mkdir(parents=True, exist_ok=True)
    figures = '{"bits_per_byte": 2.5, "bits_per_token": 2.5}'
    (workdir / f"evaluations/5/{flags['split']}.json").write_text(figures)
"""


class Sweeps:
    """Runs sweeps of `sweep.gin` in the current directory."""

    def __init__(self, directory: Path):
        self.directory = directory

    def write(self, text: str, run: str = RUN) -> None:
        (self.directory / "sweep.gin").write_text(run + text)

    def __call__(self, *flags: str) -> None:
        files = [] if any("gin_file" in flag for flag in flags) else ["--gin_file=sweep.gin"]
        sweep.main(sweep.parser().parse_args([*files, "--workdir=out", *flags]))

    def refusal(self, text: str, *flags: str, error: type[BrtError] = BrtError) -> str:
        """Returns the error with which a sweep is refused before it writes any file."""
        self.write(text)
        before = sorted(self.directory.rglob("*"))
        with pytest.raises(error) as caught:
            self(*flags)
        assert sorted(self.directory.rglob("*")) == before
        message = str(caught.value)
        assert "\n" not in message
        return message

    def starts(self) -> list[str]:
        """Returns the lines `train POINT` and `evaluate POINT` since the last call, in order."""
        file = self.directory / "starts.txt"
        lines = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        return lines


@pytest.fixture
def sweeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweeps:
    """Returns sweeps in an empty directory with short documents."""
    monkeypatch.chdir(tmp_path)
    for name in ("train", "validation", "test"):
        (tmp_path / f"{name}.txt").write_text(f"what a {name} document says " * 40)
    return Sweeps(tmp_path)


@pytest.fixture
def quick(sweeps: Sweeps, monkeypatch: pytest.MonkeyPatch) -> Sweeps:
    """Returns sweeps without plots whose processes run COMMAND instead of brt.train and
    brt.evaluate.

    A script POINT.py in the directory decides what the command does with a point.
    """
    package = sweeps.directory / "brt"
    package.mkdir()
    for name in ("__init__", "train", "evaluate"):
        (package / f"{name}.py").write_text("" if name == "__init__" else COMMAND)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(sweeps.directory), str(ROOT)]))
    monkeypatch.setattr("brt.sweeping.job._POLL_SECONDS", 0.01)
    monkeypatch.setattr("brt.sweeping.report.draw", lambda *arguments: [])
    return sweeps


@pytest.fixture
def names(sweeps: Sweeps, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[Any]]:
    """Returns a function that lists the directories of a sweep's points with --list."""

    def listed(text: str, *flags: str) -> list[str]:
        sweeps.write(text)
        sweeps("--list", *flags)
        return [line.split()[1] for line in capsys.readouterr().out.splitlines()]

    return listed
