"""Compiles kernels and the paper's train step for GPUs, on a machine without a GPU."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("jax_cuda12_plugin", "nvidia")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(importlib.util.find_spec(name) for name in NEEDED),
        reason="the GPU compiler is not installed (pip install 'brt[gpu-compile]')",
    ),
]


def run(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def kernels(place: Path, *options: str) -> dict[str, dict[str, int]]:
    """Returns the figures of kernels that tools/benchmark/gpu_kernels.py compiles."""
    run("tools/benchmark/gpu_kernels.py", f"--json={place / 'kernels.json'}", *options)
    return json.loads((place / "kernels.json").read_text())["found"]


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ("--window=512", 4),
        ("--window=4096 --dropout --dtype=float16", 4),
        ("--window=128 --dropout --strictly_past", 4),
        ("--window=2048 --block=256", 4),
        ("--window=992 --block=248", 4),
        ("--operation=softmax_attention", 3),
        ("--operation=masked_attention --head_dims=64,128", 4),
        ("--operation=masked_attention --head_dims=64,128 --dropout --dtype=float16", 4),
        ("--operation=clustered_attention", 3),
        ("--operation=causal_clustered_attention", 6),
        ("--operation=segmented_attention", 3),
    ],
)
def test_kernels_compile_without_spills_or_atomics_and_use_the_matrix_units(
    options: str, count: int, tmp_path: Path
) -> None:
    """For each head size, there are kernels for the forward pass and for the gradients of
    queries, of keys and values, and of a bias. Causal clustered attention attends twice.
    """
    found = kernels(tmp_path, *options.split())
    assert len(found) == count * (2 if "head_dims" in options else 3)
    for name, used in found.items():
        assert (used["spilled"], used["atomics"]) == (0, 0), name
        assert used["wgmma"] > 0 and used["tma"] > 0 and used["programs"] > 0, name


def test_the_papers_step_needs_less_memory_than_with_plain_xla(tmp_path: Path) -> None:
    def peak(implementation: str) -> int:
        bindings = (
            "Model.vocab_size = 32000", "Training.batch_size = 8",
            f"Kernels.use = 'window_attention={implementation}'",
        )  # fmt: skip
        place = tmp_path / f"{implementation}.json"
        run(
            "-m", "brt.plan", "--gin_file=configs/base/paper.gin",
            "--gin_file=configs/models/rec_fixed_skip.gin", "--topology=h100x1",
            f"--json={place}", *(f"--gin_bindings={b}" for b in bindings),
        )  # fmt: skip
        return json.loads(place.read_text())["peak_bytes"]

    assert peak("auto") < 2 / 3 * peak("xla")
