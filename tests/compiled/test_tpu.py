"""Compiles kernels and the paper's train step for TPUs, on a machine without a TPU."""

import importlib.util
import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from brt.planning.kernel_cycles import BUNDLES, LIBTPU, PASS_BUNDLES

ROOT = Path(__file__).resolve().parents[2]
CHIPS = ("v4", "v5e", "v5p", "v6e")
# Names of the cases of tools/benchmark/kernels.py, with the number of their kernels.
CASES = {
    "window": 6,
    "local": 2,
    "recurrent": 2,
    "loss": 2,
    # The case also has the attention kernels, with a mask for each query.
    "segmented": 6,
    "masked": 2,
    "masked_dropout": 2,
    "clustered": 2,
    "improved": 2,
    "causal": 4,
    "optimizer": 2,
}
# A schedule may be longer than that in the table by this factor before the test fails.
GROWTH = 1.05
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="the TPU compiler is not installed (pip install 'brt[tpu-compile]')",
    ),
]


def run(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


SIZES = [(512, 128, "bfloat16"), (2048, 64, "bfloat16"), (128, 256, "bfloat16"),
         (256, 128, "float32")]  # fmt: skip
# Cores of a v4 have only 16 MiB of VMEM.
TOO_LARGE = [("v4", 2048, 64, "bfloat16")]


@pytest.mark.parametrize(
    ("chip", "window", "head_dim", "dtype"),
    [(chip, *size) for size in SIZES for chip in CHIPS if (chip, *size) not in TOO_LARGE]
    + [("v4", 1024, 128, "bfloat16")],
)
def test_kernels_compile_forward_and_backward(
    chip: str, window: int, head_dim: int, dtype: str
) -> None:
    sizes = f"--window={window}", f"--head_dim={head_dim}", f"--dtype={dtype}"
    out = run("tools/benchmark/kernels.py", f"--one={chip}", *sizes)
    used = json.loads(out.splitlines()[-1])
    assert len(used) == CASES["window"] and max(used.values()) < 64 * 2**20


@pytest.mark.parametrize(
    ("chip", "window", "head_dim", "dtype"),
    [
        *((chip, 512, 64, "bfloat16") for chip in CHIPS),
        ("v5e", 2048, 64, "bfloat16"),
        ("v5e", 2048, 256, "bfloat16"),
        ("v5e", 256, 128, "float32"),
        # These windows are split into sub-windows.
        ("v4", 2048, 64, "bfloat16"),
        ("v5e", 4096, 128, "bfloat16"),
    ],
)
def test_the_kernels_of_windows_that_are_not_a_block_compile(
    chip: str, window: int, head_dim: int, dtype: str
) -> None:
    sizes = f"--window={window}", f"--head_dim={head_dim}", f"--dtype={dtype}"
    out = run("tools/benchmark/kernels.py", f"--one={chip}", "--case=local", *sizes)
    used = json.loads(out.splitlines()[-1])
    limit = 16 if chip == "v4" else 64
    assert len(used) == CASES["local"] and max(used.values()) < limit * 2**20


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("masked", "bfloat16"),
        ("masked", "float32"),
        ("segmented", "bfloat16"),
        ("segmented", "float32"),
        ("clustered", "bfloat16"),
        ("clustered", "float32"),
        ("improved", "bfloat16"),
        ("improved", "float32"),
        ("causal", "bfloat16"),
    ],
)
def test_other_kernels_compile_forward_and_backward(chip: str, case: str, dtype: str) -> None:
    out = run("tools/benchmark/kernels.py", f"--one={chip}", f"--case={case}", f"--dtype={dtype}")
    used = json.loads(out.splitlines()[-1])
    assert len(used) == CASES[case] and max(used.values()) < 64 * 2**20


@pytest.mark.parametrize("window", [64, 1024, 2048])
def test_the_kernels_of_masked_attention_compile_for_other_lengths(window: int) -> None:
    """With more than 1,024 tokens there are several tiles of queries."""
    out = run("tools/benchmark/kernels.py", "--one=v5e", "--case=masked", f"--window={window}")
    used = json.loads(out.splitlines()[-1])
    assert len(used) == CASES["masked"] and max(used.values()) < 64 * 2**20


@pytest.mark.parametrize("chip", CHIPS)
def test_the_kernel_of_the_optimizer_compiles(chip: str) -> None:
    out = run("tools/benchmark/kernels.py", f"--one={chip}", "--case=optimizer")
    used = json.loads(out.splitlines()[-1])
    # A v4 has another size of tiles for layers that fit into its VMEM.
    assert len(used) == CASES["optimizer"] + (chip == "v4")
    # On chips with 128 MiB of VMEM, the figure includes arrays that XLA keeps there.
    assert max(used.values()) < {"v4": 16, "v5p": 64}.get(chip, 128) * 2**20


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(
    ("window", "head_dim", "dtype"),
    [(512, 128, "bfloat16"), (256, 256, "bfloat16"), (384, 64, "float32")],
)
def test_the_states_kernel_compiles_forward_and_backward(
    chip: str, window: int, head_dim: int, dtype: str
) -> None:
    sizes = f"--window={window}", f"--head_dim={head_dim}", f"--dtype={dtype}"
    out = run("tools/benchmark/kernels.py", f"--one={chip}", "--case=recurrent", *sizes)
    used = json.loads(out.splitlines()[-1])
    states = [name for name in used if name.startswith("state_attention")]
    assert len(states) == CASES["recurrent"]
    assert max(used.values()) < (16 if chip == "v4" else 64) * 2**20


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(64, "bfloat16"), (128, "bfloat16"), (256, "bfloat16"), (128, "float32")],
)
def test_the_kernels_of_the_loss_compile(chip: str, head_dim: int, dtype: str) -> None:
    sizes = f"--head_dim={head_dim}", f"--dtype={dtype}"
    out = run("tools/benchmark/kernels.py", f"--one={chip}", "--case=loss", *sizes)
    assert len(json.loads(out.splitlines()[-1])) == CASES["loss"]


@pytest.mark.parametrize(("width", "vocabulary"), [(2048, 4096), (1536, 32000)])
def test_the_largest_tiles_of_the_loss_fit_into_a_v4(width: int, vocabulary: int) -> None:
    sizes = f"--head_dim={width // 8}", f"--vocabulary={vocabulary}"
    out = run("tools/benchmark/kernels.py", "--one=v4", "--case=loss", *sizes)
    assert len(json.loads(out.splitlines()[-1])) == CASES["loss"]


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is not None and version("libtpu") != LIBTPU,
    reason=f"the table was counted with libtpu {LIBTPU}",
)
def test_schedules_are_not_longer_than_those_that_plans_count_with(tmp_path: Path) -> None:
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for case in CASES:
        file = tmp_path / f"{case}.json"
        run("tools/benchmark/kernels.py", f"--json={file}", f"--case={case}")
        found |= json.loads(file.read_text())["found"]
    assert found.keys() <= BUNDLES.keys()
    # The cases have windows of 512.
    other = re.compile(r"(window|document)_attention_(backward_)?1x(1024|2048)x")
    known = {kernel: x for kernel, x in BUNDLES.items() if not other.match(kernel)}
    longer = {
        (kernel, chip): (every[chip], bundles)
        for kernel, every in known.items()
        for chip, bundles in found[kernel].items()
        if sum(bundles) > GROWTH * (every[chip] + PASS_BUNDLES.get(kernel, {}).get(chip, 0))
    }
    assert not longer


def test_a_step_of_a_pretrained_decoder_compiles(tmp_path: Path) -> None:
    """Three heads of queries share a head of keys. The kernels must read the keys without copying
    them for each head, so attention reads and writes few bytes.
    """
    bindings = "Model.layers = 2", "Training.batch_size = 1", "Model.dtype = 'bfloat16'"
    run(
        "-m", "brt.plan", "--gin_file=configs/decoders/smollm2_135m.gin", "--topology=v5e:1x1",
        "--effort=low", f"--json={tmp_path / 'plan.json'}",
        *(f"--gin_bindings={b}" for b in bindings),
    )  # fmt: skip
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["parts"]["attention"]["bytes"] < 1.3e9


@pytest.mark.parametrize(
    ("topology", "lanes", "gib"), [("v4:2x4x4", 32, 6.0), ("v5e:4x4", 16, 6.0)]
)
def test_the_papers_step_fits(topology: str, lanes: int, gib: float, tmp_path: Path) -> None:
    """Each chip has one sequence, and kernels run on each device without communication."""
    bindings = "Model.vocab_size = 32000", f"Training.batch_size = {lanes}", "Mesh.data = -1"
    run(
        "-m", "brt.plan", "--gin_file=configs/base/paper.gin",
        "--gin_file=configs/models/rec_fixed_skip.gin", f"--topology={topology}", "--effort=low",
        f"--json={tmp_path / 'plan.json'}", *(f"--gin_bindings={b}" for b in bindings),
    )  # fmt: skip
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["peak_bytes"] < gib * 2**30
    moved = {kind: one["bytes"] for kind, one in found["collectives"].items()}
    # Gradients are reduced once a step, and sharded updates of parameters are gathered once.
    once = moved.pop("all-reduce"), moved.pop("all-gather")
    assert max(once) < 1.0e9 and sum(moved.values()) < 10e6


@pytest.mark.parametrize(("data", "fsdp"), [(2, 4), (4, 2)])
def test_gradients_cross_slices_once_in_a_step(data: int, fsdp: int, tmp_path: Path) -> None:
    """A batch that is read in parts sends as much between slices as one that is read at once."""

    def sent(parts: int) -> int:
        sizes = {"Mesh.data": data, "Mesh.fsdp": fsdp, "Training.gradient_accumulation": parts}
        sizes |= {"Training.batch_size": 32, "Model.vocab_size": 256, "Recurrence.layers": "(1,)"}
        bindings = [f"--gin_bindings={name} = {value}" for name, value in sizes.items()]
        run(
            "-m", "brt.plan", "--gin_file=configs/base/tiny.gin", "--topology=2xv5e:2x2",
            "--effort=low", f"--json={tmp_path / 'plan.json'}", *bindings,
        )  # fmt: skip
        found = json.loads((tmp_path / "plan.json").read_text())["collectives"]
        return sum(x["bytes"] for kind, x in found.items() if kind.endswith("between slices"))

    assert 0 < sent(4) <= 1.1 * sent(1)
