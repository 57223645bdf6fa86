"""Tests that real processes on this machine, each with its own devices, train as one run."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_runs import environment

from brt import train

# Quick tests show the parts: processes that agree (tests/distributed/test_processes.py), devices
# that share a run (test_equality.py), and checkpoints that are restored on other devices
# (tests/checkpointing/test_reader.py).
pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = ROOT / "launch/local/run_processes.py"
GIN = """
Model.layers = 1
Recurrence.layers = (0,)
Model.model_dim = 16
Model.heads = 4
Model.head_dim = 4
Model.mlp_dim = 32
Model.window = 8
Recurrence.states = 8
Training.steps = 8
Training.batch_size = 8
Training.segment_length = 16
Training.log_every = 2
Training.evaluate_every = 0
Training.sample_every = 0
Training.plots = False
Optimizer.learning_rate = 0.01
Optimizer.warmup_steps = 2
Checkpoint.every = 4
Sampling.max_tokens = 4
Evaluation.tokens_per_document = 100
"""
TOLERANCE = 1e-5  # relative, of losses
MESH = ("Mesh.data = 2", "Mesh.fsdp = 2", "Mesh.tensor = 2")


class Trainer:
    """Runs trainings in directories under `place`, with one process or with two."""

    def __init__(self, place: Path):
        self.place = place
        words = "fünf Füchse laufen über den kalten See und ruhen dann am Ufer aus ".split()
        for i in range(8):
            text = " ".join(words[(i * j) % len(words)] for j in range(150 + 10 * i))
            (place / f"{i}.txt").write_text(text)
        (place / "tiny.gin").write_text(f"{GIN}\nData.train = '{place}/*.txt'\n")
        self.environment = environment(place)

    def flags(self, workdir: str, *bindings: str) -> list[str]:
        where = f"--gin_file={self.place / 'tiny.gin'}", f"--workdir={self.place / workdir}"
        return [*where, *(f"--gin_bindings={binding}" for binding in bindings)]

    def command(self, workdir: str, *bindings: str) -> list[str]:
        return [sys.executable, "-m", "brt.train", *self.flags(workdir, *bindings)]

    def start(self, workdir: str, *bindings: str, devices: int = 8) -> subprocess.Popen:
        command = self.command(workdir, *bindings)
        flags = ["--processes=2", f"--devices_per_process={devices // 2}"]
        return subprocess.Popen(
            [sys.executable, str(LAUNCHER), *flags, "--", *command], env=self.environment,
            cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip

    def run(self, workdir: str, *bindings: str, devices: int = 8) -> str:
        process = self.start(workdir, *bindings, devices=devices)
        out, _ = process.communicate(timeout=300)
        assert process.returncode == 0, out
        return out

    def alone(self, workdir: str, *bindings: str) -> None:
        """Trains in this process, which also has eight devices."""
        train.main(train.parser().parse_args(self.flags(workdir, *bindings)))

    def rows(self, workdir: str) -> list[dict]:
        lines = (self.place / workdir / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    return Trainer(tmp_path_factory.mktemp("processes"))


def assert_same_curve(found: list[dict], expected: list[dict]) -> None:
    """Compares losses, gradient norms and evaluations of two runs, row by row."""
    tags = "train/loss", "train/gradient_norm", "eval/validation/bits_per_byte"
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    for row, other in zip(found, expected, strict=True):
        for tag in tags:
            if tag in other:
                assert row[tag] == pytest.approx(other[tag], rel=TOLERANCE)


def test_two_processes_evaluate_probe_and_sample(trainer: Trainer) -> None:
    looks = ["Training.steps = 4", *(f"Training.{x}_every = 2" for x in ("evaluate", "probe"))]
    looks += ["Training.sample_every = 4", "Model.layers = 2"]
    trainer.alone("looking alone", *looks)
    trainer.run("looking", *MESH, *looks)
    found, expected = trainer.rows("looking"), trainer.rows("looking alone")
    assert_same_curve(found, expected)
    assert [set(row) for row in found] == [set(row) for row in expected]
    assert any("eval/validation/bits_per_byte" in row for row in found)
    samples = trainer.place / "looking/samples"
    assert [path.name for path in samples.iterdir()] == ["00000004.txt"]


@pytest.mark.parametrize(
    ("model", "devices", "mesh", "other"),
    [
        pytest.param(
            ("Recurrence.layers = ()", "Optimizer.name = 'adamw'"), 2, ("Mesh.data = 2",),
            ("Mesh.fsdp = 2",), id="window"
        ),
        pytest.param(
            ("Recurrence.layers = (0,)",), 8, MESH, ("Mesh.fsdp = 2", "Mesh.sequence = 2"),
            id="recurrent",
        ),
    ],
)  # fmt: skip
def test_two_processes_are_one_run_which_one_process_goes_on_with(
    trainer: Trainer,
    model: tuple[str, ...],
    devices: int,
    mesh: tuple[str, ...],
    other: tuple[str, ...],
) -> None:
    """Metrics are written once. One process resumes the run of two processes on another mesh."""
    one, two = f"one {devices}", f"two {devices}"
    trainer.alone(one, *model, "Training.steps = 8")
    out = trainer.run(two, *model, *mesh, "Training.steps = 4", devices=devices)
    assert "[0] " in out and "step 4/4" in out
    trainer.alone(two, *model, *other, "Training.steps = 8")
    assert_same_curve(trainer.rows(two), trainer.rows(one))
    assert sorted(p.name for p in (trainer.place / two).iterdir()) == sorted(
        p.name for p in (trainer.place / one).iterdir()
    )


def _until(condition: Callable[[], object], seconds: float = 120) -> None:
    """Waits until the condition is true, or fails after this time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


def _child(process: subprocess.Popen, index: int) -> int:
    """Returns the process id of the launcher's process with this index."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    line = f"--process_index={index}".encode()
    return next(int(c) for c in children if line in Path(f"/proc/{c}/cmdline").read_bytes())


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_two_processes_leave_the_same_batches_out_as_one(trainer: Trainer, policy: str) -> None:
    """With a tiny learning rate, losses depend on the batch only, so that some exceed the
    median.
    """
    bad = [f"Training.on_bad_step = '{policy}'", "Training.spike_factor = 1.0005"]
    bad += ["Optimizer.learning_rate = 1e-6", "Training.steps = 26", "Training.max_bad_steps = 99"]
    trainer.alone(f"{policy} alone", *bad)
    trainer.run(policy, *MESH, *bad)
    one, two = (
        (trainer.place / name / "bad_batches.jsonl") for name in (f"{policy} alone", policy)
    )
    found, expected = (
        [json.loads(line) for line in x.read_text().splitlines()] for x in (two, one)
    )
    without = [{k: v for k, v in record.items() if k != "reason"} for record in found]
    assert found and without == [{k: r[k] for k in r if k != "reason"} for r in expected]
    assert_same_curve(trainer.rows(policy), trainer.rows(f"{policy} alone"))


def test_all_stop_at_the_same_step_where_one_is_asked_to(trainer: Trainer) -> None:
    process = trainer.start("stopped", *MESH, "Training.steps = 100000")
    _until(lambda: (trainer.place / "stopped/metrics.jsonl").exists() and trainer.rows("stopped"))
    os.kill(_child(process, 1), signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 75, out
    saved = {line.split("saved at step ")[1] for line in out.splitlines() if "saved at" in line}
    assert len(saved) == 1 and out.count("saved at step") == 2
    step = int(saved.pop().split(";")[0])
    assert str(step) in {p.name for p in (trainer.place / "stopped/checkpoints").iterdir()}


# A program in which all processes but the first take four seconds to leave after the end.
LATE = """
import argparse, time, jax
from brt import distributed
from brt.distributed import processes

parser = argparse.ArgumentParser()
distributed.add_flags(parser)
distributed.start(parser.parse_args())
with processes.explain_peer_errors():
    processes.wait_for_all("end")
    if not processes.is_first():
        leave = jax.distributed.shutdown
        jax.distributed.shutdown = lambda: (time.sleep(4), leave())
"""


def test_the_first_process_waits_for_the_others_to_leave() -> None:
    """If the first process did not wait, the others would abort."""
    launch = [sys.executable, str(LAUNCHER), "--processes=3", "--", sys.executable, "-c", LATE]
    done = subprocess.run(launch, cwd=ROOT, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stdout


def test_another_config_on_one_process_is_named(trainer: Trainer, tmp_path: Path) -> None:
    """Both processes report the difference before step 0."""
    change = 'set -- "$@" --gin_bindings="Optimizer.warmup_steps = 1"'
    out = _differing(trainer, tmp_path, change, "different")
    sentence = "process 1 of 2 on .* has a different config than process 0: 'Optimizer.warmup_ste"
    assert len(re.findall(sentence, out)) == 2


def _differing(trainer: Trainer, place: Path, change: str, workdir: str) -> str:
    """Returns the output of both processes when process 1 starts with a different setting."""
    other = place / "other.sh"
    other.write_text(f'#!/bin/sh\ncase "$*" in *process_index=1*) {change};; esac\nexec "$@"\n')
    other.chmod(0o755)
    command = trainer.command(workdir, *MESH)
    done = subprocess.run(
        [sys.executable, str(LAUNCHER), "--devices_per_process=4", "--", str(other), *command],
        env=trainer.environment, cwd=ROOT, text=True, capture_output=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 2, done.stdout
    return done.stdout


def test_a_workdir_that_is_not_shared_is_refused(trainer: Trainer, tmp_path: Path) -> None:
    change = f'set -- "$@" --workdir={tmp_path / "elsewhere"}'
    out = _differing(trainer, tmp_path, change, "shared not")
    assert out.count("is not the same directory for all processes: process 1 of 2") == 2


def test_who_waits_in_vain_for_the_others_says_so() -> None:
    code = (
        "from brt.distributed import processes; processes.RENDEZVOUS_SECONDS = 2; "
        "processes.start(processes.Launch('localhost:9', 2, 1))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 75
    assert "process 1 of 2 did not find all others at localhost:9 within 2 s" in done.stderr
