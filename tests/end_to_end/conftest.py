"""Fixtures that run brt's commands as processes, with a model that compiles in seconds."""

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from tiny_runs import environment

from brt import durable, train

# Lengths in bytes of the documents of a split. Most documents begin inside a segment of a lane.
LENGTHS = {"a": 1, "b": 70, "c": 333, "d": 500, "e": 41}
CONFIG = """
Model.layers = 2
Memorizing.layers = (0,)
Recurrence.layers = (1,)
Memorizing.size = 40
Memorizing.neighbors = 4
Model.model_dim = 16
Model.heads = 2
Model.head_dim = 8
Model.mlp_dim = 16
Model.window = 8
Recurrence.states = 8
Model.dropout = 0.0
Training.steps = 24
Training.batch_size = 4
Training.segment_length = 16
Training.log_every = 5
Training.evaluate_every = 12
Training.sample_every = 0
Training.plots = False
Optimizer.name = 'adamw'
Optimizer.learning_rate = 0.01
Optimizer.warmup_steps = 5
Checkpoint.every = 4
Sampling.max_tokens = 4
Sampling.temperature = 0.0
Data.train = '{train}'
Data.validation = '{validation}'
Data.test = '{test}'
"""
# The beginning of the configs of other tasks.
SMALL = """
Training.steps = 8
Training.batch_size = 4
Training.log_every = 2
Training.sample_every = 8
Model.layers = 1
Model.model_dim = 16
Model.heads = 2
Model.mlp_dim = 32
Optimizer.name = 'adamw'
Optimizer.learning_rate = 0.01
Optimizer.schedule = 'constant'
Optimizer.warmup_steps = 2
Checkpoint.every = 3
"""
STEPS_PER_EPOCH = 16  # 121 blocks in four lanes, two blocks per lane and step

# Code that runs a command with hooks: `action` is called at a given call of a function.
_HOOK = """
import importlib, os, runpy, signal, sys, threading, time

def hook(place, call, action):
    module, name = place.rsplit(".", 1)
    owner = importlib.import_module(module)
    function, calls = getattr(owner, name), []
    def hooked(*args, **kwargs):
        calls.append(None)
        if len(calls) == call:
            action()
        return function(*args, **kwargs)
    setattr(owner, name, hooked)

def send(*signals):
    def action():
        for number in signals:
            os.kill(os.getpid(), number)
            time.sleep(0.2)
    return action

def disk_full():
    raise OSError(28, "No space left on device")

{hook}
sys.argv[0] = {module!r}
runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
"""


class Result(NamedTuple):
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str


class Commands:
    """Starts commands, which share a config, its documents and a cache of compiled programs."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.config = directory / "tiny.gin"
        self._environment = environment(directory) | {
            "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1",
            "XDG_CACHE_HOME": str(directory / "cache"),
        }

    def once(self, made: Path, make: Callable[[], object]) -> None:
        """Calls `make` if the path `made` does not exist; pytest workers share the directory."""
        with (self.directory / f"{made.name}.lock").open("ab") as file:
            durable.acquire_lock(file, wait=True)
            if not made.exists():
                make()

    def write_config(self) -> None:
        """Writes the config and the documents that the config names."""
        splits = {"train": ".", "validation": "!", "test": "?"}
        books = {name: write_books(self.directory / name, last) for name, last in splits.items()}
        self.config.write_text(CONFIG.format(**books))

    def run(
        self, name: str, *flags: str, hook: str = "", code: int = 0, noisy: bool = False
    ) -> Result:
        """Runs a command to its end and checks its exit code.

        Args:
          name: the name of the command, such as "train".
          flags: the command's flags.
          hook: Python code that runs in the process before the command; see `_HOOK`.
          code: the expected exit code.
          noisy: whether stderr may contain a traceback, for example because the threads of a
            library complain about removed files.
        """
        module = f"brt.{name}"
        start = ["-c", _HOOK.format(hook=hook, module=module)] if hook else ["-m", module]
        done = subprocess.run(
            [sys.executable, *start, *flags],
            capture_output=True, text=True, env=self._environment, timeout=300,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        assert noisy or code == 1 or "Traceback" not in done.stderr, done.stderr
        return Result(done.returncode, done.stdout, done.stderr)

    def train(self, workdir: Path, *bindings: str, hook: str = "", code: int = 0) -> Result:
        flags = [f"--gin_file={self.config}", f"--workdir={workdir}"]
        flags += [f"--gin_bindings={binding}" for binding in bindings]
        return self.run("train", *flags, hook=hook, code=code)


def write_books(directory: Path, last: str) -> Path:
    """Writes random documents of the sizes in LENGTHS, each of which ends with `last`."""
    draw = random.Random(last)
    directory.mkdir()
    for name, length in LENGTHS.items():
        text = "".join(draw.choices("etaoin shrdlu\n", k=length - 1)) + last
        (directory / f"{name}.txt").write_text(text)
    return directory


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Commands:
    """Returns the runner of commands, whose directory all pytest workers share."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
    (shared / "commands").mkdir(exist_ok=True)
    found = Commands(shared / "commands")
    found.once(found.config, found.write_config)
    return found


@pytest.fixture(scope="session")
def trained(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a copy of the directory of an uninterrupted run; tests must not change the copy."""
    run = commands.directory / "trained"
    flags = [f"--gin_file={commands.config}", f"--workdir={run}", "--gin.Training.sample_every=12"]
    commands.once(run / "checkpoints/24", lambda: train.main(train.parser().parse_args(flags)))
    return Path(shutil.copytree(run, tmp_path_factory.mktemp("trained") / "run"))
