"""Tests that commands set no environment variable of JAX or XLA after they have imported jax.

JAX reads these variables during its import, so a later change would have no effect. The commands
run as processes without any such variable, because tests/conftest.py sets some of them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from brt.runtime import use_cpu_without_accelerator

ROOT = Path(__file__).resolve().parents[2]
WATCHED = """
import os, runpy, sys

def watch(event, given):
    if event == "os.putenv" and "jax" in sys.modules:
        name = os.fsdecode(given[0])
        if name.startswith(("JAX_", "XLA_", "LIBTPU_")):
            print(f"{name} is set after jax was imported", file=sys.stderr, flush=True)
            os._exit(99)

sys.addaudithook(watch)
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""
TINY = (
    "Model.layers = 1", "Recurrence.layers = ()", "Model.model_dim = 16", "Model.heads = 2",
    "Model.head_dim = 8", "Model.mlp_dim = 16", "Model.window = 8", "Model.vocab_size = 32",
    "Training.segment_length = 16", "Training.batch_size = 6", "Mesh.data = 3",
    "Optimizer.name = 'adamw'", "Optimizer.clip_norm = 0.0",
)  # fmt: skip
SETTINGS = [f"--gin_bindings={binding}" for binding in TINY]


def run(tmp_path: Path, command: str, *flags: str) -> subprocess.CompletedProcess:
    """Runs `python -m brt.COMMAND` without variables of JAX; the process ends with exit code 99
    if the command sets one after the import of jax.
    """
    ours = ("JAX_", "XLA_", "TF_", "LIBTPU_", "TPU_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    words = [sys.executable, "-c", WATCHED, f"brt.{command}", *flags]
    env |= {"PYTHONPATH": str(ROOT)}
    return subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)


@pytest.mark.slow_cases("sweep-*", "plan-*")
@pytest.mark.slow_cases("evaluate-*", "generate-*", "inspect-*", "prepare-*", "convert-*")
@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("train", ["--workdir=a", "--dry_run", "--gin_bindings=Data.train = 'missing'"]),
        ("evaluate", ["--workdir=missing"]),
        ("generate", ["--workdir=missing", "--prompt=a"]),
        ("inspect", ["--workdir=missing"]),
        ("sweep", ["--workdir=missing", "--gin_file=missing.gin"]),
        ("plan", ["--topology=v1:1", *SETTINGS]),
        ("prepare", ["--documents=missing", "--tokenizer=bytes", "--output=a"]),
        ("convert", ["--from=brt", "missing", "--to=hf", "a"]),
    ],
)  # fmt: skip
def test_no_variable_of_jax_is_set_after_its_import(
    tmp_path: Path, command: str, flags: list[str]
) -> None:
    done = run(tmp_path, command, *flags)
    assert done.returncode in (2, 3, 4), done.stderr
    *notes, last = done.stderr.splitlines()
    assert last.startswith("brt: error: "), done.stderr
    assert all(note.startswith("brt: ") for note in notes), "of a compiler that finds no device"
    assert "--help lists the flags" not in done.stderr, "it ended before it began"


@pytest.mark.parametrize(
    ("installed", "files", "platforms"),
    [
        ({"libtpu"}, (), "cpu"),
        ({"jax_cuda12_plugin"}, ("nvme0", "null"), "cpu"),
        ({"libtpu", "jax_cuda12_plugin"}, (), "cpu"),
        ({"libtpu", "jax_cuda13_plugin"}, ("nvidia0",), None),
        ({"libtpu", "jax_cuda12_plugin"}, ("accel0",), None),
        ({"jax_cuda12_plugin"}, ("dxg",), None),
        (set(), (), None),
    ],
)
def test_compilers_of_machines_elsewhere_are_not_asked_for_devices(
    installed: set[str], files: tuple[str, ...], platforms: str | None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name in installed or None)
    for name in files:
        (tmp_path / name).touch()
    use_cpu_without_accelerator(tmp_path)
    assert os.environ.get("JAX_PLATFORMS") == platforms
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    use_cpu_without_accelerator(tmp_path)
    assert os.environ["JAX_PLATFORMS"] == "tpu", "what a person asked for stays"


@pytest.mark.slow
def test_fake_devices_are_as_many_as_asked_for_and_of_the_cpu(tmp_path: Path) -> None:
    done = run(tmp_path, "plan", *SETTINGS, "--devices=3", "--json=plan.json")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "plan.json").read_text())
    assert (found["devices"], found["topology"]) == (3, "3 x cpu")
