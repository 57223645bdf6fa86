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
    "options",
    [
        ["--window=512"],
        ["--window=4096", "--dropout", "--dtype=float16"],
        ["--window=16384"],
        ["--window=128", "--dropout", "--null_keys", "--strictly_past"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("implementation", ["pallas_gpu", "pallas_mosaic_gpu"])
def test_kernels_compile_without_spills_or_atomics_and_use_the_matrix_units(
    implementation: str, options: list[str], tmp_path: Path
) -> None:
    """For each of three head sizes, there are four kernels: one for the forward pass, and one each
    for the gradients of queries, of keys and values, and of the bias.
    """
    found = kernels(tmp_path, f"--implementation={implementation}", *options)
    assert len(found) == 4 * 3
    for name, used in found.items():
        assert (used["spilled"], used["atomics"]) == (0, 0), name
        assert used["wgmma"] > 0 and used["programs"] > 0, name
        assert (used["tma"] > 0) == (implementation == "pallas_mosaic_gpu"), name


def test_kernels_of_windows_that_are_not_a_block_compile_without_spills(tmp_path: Path) -> None:
    found = kernels(tmp_path, "--window=2048", "--block=256")
    assert len(found) == 4 * 3
    for name, used in found.items():
        assert (used["spilled"], used["atomics"]) == (0, 0) and used["wgmma"] > 0, name


@pytest.mark.parametrize("options", [[], ["--null_keys", "--dtype=float16"]], ids=" ".join)
def test_kernels_of_recurrent_states_compile_without_spills(
    options: list[str], tmp_path: Path
) -> None:
    found = kernels(tmp_path, "--operation=softmax_attention", *options)
    assert len(found) == 3 * 3
    for name, used in found.items():
        assert (used["spilled"], used["atomics"]) == (0, 0) and used["wgmma"] > 0, name


@pytest.mark.parametrize("options", [[], ["--dropout", "--dtype=float16"]], ids=" ".join)
def test_kernels_of_encoders_compile_without_spills(options: list[str], tmp_path: Path) -> None:
    found = kernels(tmp_path, "--operation=masked_attention", "--head_dims=64,128", *options)
    assert len(found) == 4 * 2
    for name, used in found.items():
        assert (used["spilled"], used["atomics"]) == (0, 0) and used["wgmma"] > 0, name


def test_the_kernels_of_centroids_compile_without_spills(tmp_path: Path) -> None:
    found = kernels(tmp_path, "--operation=clustered_attention", "--head_dims=64,128")
    assert len(found) == 4 * 2
    for name, used in found.items():
        assert (used["spilled"], used["atomics"]) == (0, 0) and used["wgmma"] > 0, name


def test_the_kernels_of_causal_clustered_attention_compile_without_spills(tmp_path: Path) -> None:
    """There are three kernels for the previous block and three for the memory of the centroids."""
    found = kernels(tmp_path, "--operation=causal_clustered_attention", "--head_dims=64,128")
    assert len(found) == 6 * 2
    for name, used in found.items():
        assert (used["spilled"], used["atomics"]) == (0, 0) and used["wgmma"] > 0, name


@pytest.mark.parametrize(
    "options", [[], ["--segment=16"], ["--segment=96", "--dtype=float16"]], ids=" ".join
)
def test_the_kernels_of_the_segmented_recurrence_compile_without_spills(
    options: list[str], tmp_path: Path
) -> None:
    """One of the three kernels, that of the membrane potentials, has no matrix products."""
    found = kernels(tmp_path, "--operation=segmented_recurrence", "--head_dims=64,128", *options)
    assert len(found) == 3 * 2
    for name, used in found.items():
        assert (used["spilled"], used["atomics"]) == (0, 0), name
        assert (used["wgmma"] > 0) == ("potentials" not in name), name


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

    assert peak("auto") < 0.6 * peak("xla")
