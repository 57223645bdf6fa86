"""Tests what the benchmarks compare and what they print."""

import argparse
import dataclasses
import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt import command_line
from brt.config import Model
from brt.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ROOT / "tools/benchmark"
BASELINES = sorted(TOOLS.glob("baselines/*.json"))


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Returns a function that imports a module of tools/benchmark."""
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module


def figures(attention: float = 30e6, loss: float = 70e6, **others: Any) -> dict[str, Any]:
    """Returns figures as `brt.plan` does, from the cycles of the attention and the loss."""
    parts = {"attention": attention, "loss": loss, "optimizer": 40.96e6}
    costs = {
        name: {"cycles": x, "bytes": 10 * x, "flops": 0.0, "bytes_anywhere": 20 * x}
        for name, x in parts.items()
    }
    total = sum(parts.values())
    memory = {"temporary_bytes": 2**30, "peak_bytes": 2**31}
    whole = {"cycles": total, "memory_bytes": 10 * total, "flops": 0.0, "topology": "v5e:1x1"}
    seconds = {"network": 0.02, "compiler": total / 1.5e9 + 0.015}
    step = {
        "tokens_per_step": 8, "model_flops": 1, "cycles_at_peak": 0.25 * total, "collectives": {},
        "covered_network_seconds": 0.005, "step_seconds": seconds, "mfu": {"compiler": 0.25},
    }  # fmt: skip
    return {"parts": costs, **whole, **memory, **step, **others}


def test_a_step_is_computation_and_what_of_the_network_is_not_covered(tool: Callable) -> None:
    found = figures(attention=9.04e6)  # 120 million cycles in all, at 1.5 GHz
    assert tool("compiled").step(found) == (
        "at least 95.0 ms a step, 25.0% of the peak by the model's FLOPs: 80.0 ms of computation, "
        "of which kernels at the chip's peak rates take 25%, and 20.0 ms of collectives, of which "
        "5.0 ms are covered"
    )


def test_a_measurement_is_written_with_what_was_measured(
    tool: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "found.json"
    args = argparse.Namespace(rounds=3, json=str(place))
    model = Model(vocab_size=300, dropout=0.1)
    tool("conditions").report(args, [1], {"Slide": model})
    written = json.loads(place.read_text())
    assert written["found"] == [1] and written["conditions"]["flags"] == {"rounds": 3}
    assert written["conditions"]["models"]["Slide"]["vocab_size"] == 300
    assert written["conditions"]["versions"]["jax"] == jax.__version__
    assert "vocab_size 300, dropout 0.1" in capsys.readouterr().out


def test_the_paper_s_rows_have_the_paper_s_vocabulary(tool: Callable) -> None:
    table1 = tool("table1_step")
    assert table1.row("Rec:fixed:skip", table1.SIZES["paper"], 4096)[0].vocab_size == 32_000


def test_the_instructions_that_most_steps_skip_are_counted_apart(tool: Callable) -> None:
    # The first region is the body of the loop over the steps. The third is inside of the second.
    regions = (2, 98), (5, 15), (6, 8), (60, 64)
    lines = [f"0x{i:x} : > {{ %v = vadd.f32" for i in range(100)]
    for number, (begin, end) in enumerate(regions):
        lines[begin] += f" ;; %1 = sbr.rel (%p1_p0) target = $region{number}"
        lines[end] += f" /* Start/End empty region {number} */"
    schedule = "\n".join(lines)
    count = tool("kernels").count
    assert count(schedule, has_passes=True) == (100 - 10 - 4, 10 + 4)
    assert count(schedule, has_passes=False) == (100, 0)


def test_a_part_that_grew_is_named_with_both_numbers(tool: Callable) -> None:
    compiled = tool("compiled")
    then = compiled.kept(figures())
    assert not list(compiled.grown(then, then))
    assert not list(compiled.grown(compiled.kept(figures(attention=31.4e6)), then))
    now = compiled.kept(figures(attention=32e6))
    cycles, size = "attention takes 32.00 Mcycles, not 30.00", "attention takes 0.32 GB, not 0.30"
    assert list(compiled.grown(now, then)) == [cycles, size]
    more = compiled.kept(figures(temporary_bytes=2**30 * 1.1))
    assert list(compiled.grown(more, then)) == ["temporaries take 1.10 GiB, not 1.00"]


def test_a_new_part_has_grown_but_one_next_to_nothing_has_not(tool: Callable) -> None:
    compiled = tool("compiled")
    then = compiled.kept(figures())
    for cycles, says in ((1e5, []), (2e6, ["copies takes 2.00 Mcycles, not 0.00"])):
        now = compiled.kept(figures())
        now["parts"]["copies"] = {"cycles": cycles, "bytes": 0}
        assert list(compiled.grown(now, then)) == says


def test_implementations_stand_side_by_side_with_ratios(tool: Callable) -> None:
    compiled = tool("compiled")
    lines = compiled.side_by_side({"xla": figures(), "kernel": figures(attention=15e6)})
    assert lines[0] == (
        "| part | xla: Mcycles | xla: GB | kernel: Mcycles | kernel: GB "
        "| cycles, kernel / xla | bytes, kernel / xla |"
    )
    assert "| attention | 30.00 | 0.30 | 15.00 | 0.15 | 0.50 | 0.50 |" in lines
    assert lines[5].startswith("| all | 140.96 |")
    assert lines[-1] == "kernel: 1.00 GiB of temporaries, peak 2.00 GiB"
    on_gpus = compiled.side_by_side({"auto": figures() | {"cycles": 0.0}})
    assert on_gpus[0] == "| part | auto: GB |"


def test_the_bound_of_a_part_is_its_products_or_its_traffic(tool: Callable) -> None:
    compiled, found = tool("compiled"), figures()
    found["parts"]["loss"]["flops"] = 0.7 * 70e6 / 1.5e9 * 197e12  # v5e: 1.5 GHz, 197 TFLOP/s
    lines = compiled.bounds(found)
    assert "| loss | 6.44 | 0.70 | 70.00 | 49.00 | 70% |" in lines
    assert "| attention | 0.00 | 0.30 | 30.00 | 0.55 | 2% |" in lines  # 0.82 TB/s
    assert len(compiled.bounds(found | {"topology": "h100x8"})) == len(lines)
    assert not compiled.bounds(found | {"topology": "cpu"})


def test_costs_of_a_token_leave_the_optimizer_out(tool: Callable) -> None:
    lines = tool("compiled").by_length({10000: figures(), 20000: figures(62e6, 140e6)})
    assert lines[2] == "| 10,000 | 10,000 | 100.0 | 200.0 | 107.4 |"
    assert lines[3].startswith("| 20,000 | 10,100 | 101.0 | 202.0 |")
    assert lines[-1] == "Largest over smallest: cycles +1.0%, bytes +1.0%, of all memories +1.0%"


def test_implementations_are_asked_for_as_the_error_says(tool: Callable) -> None:
    variants = tool("compiled").variants
    assert list(variants(None)) == [("auto", [])]
    assert list(variants("kmeans:xla")) == [("xla", ["Kernels.use = ('kmeans=xla',)"])]
    both = ["Kernels.use = ('kmeans=reference', 'reformer=reference')"]
    assert list(variants("kmeans,reformer:xla,reference"))[1] == ("reference", both)
    with pytest.raises(ConfigError, match="--implementations=xla must be operations and names"):
        list(variants("xla"))


@pytest.mark.parametrize("file", BASELINES, ids=lambda file: file.stem)
def test_a_baseline_has_a_case_that_still_is_one(file: Path) -> None:
    recorded = json.loads(file.read_text())
    case = recorded["case"]
    config = command_line.read(case["gin_file"], case["gin_bindings"]).config
    assert f"Training.batch_size = {config.training.batch_size}" in case["gin_bindings"]
    assert recorded["versions"].keys() == {"jax", "libtpu"}
    whole = recorded["parts"].pop("all")
    for column, number in whole.items():
        assert number == pytest.approx(sum(part[column] for part in recorded["parts"].values()))


def test_contestants_compute_the_same_as_float64(tool: Callable) -> None:
    kinds = tool("attention_kinds")
    sizes = kinds.Sizes(lanes=2, tokens=24, window=8, heads=2, head_dim=4, dtype="float32")
    given = [kinds.inputs(sizes, seed) for seed in range(2)]
    found = dict(tool("attention_jax").contestants(given, sizes))
    here = {name: one for name, one in found.items() if not isinstance(one, str)}
    assert here.keys() >= {"brt xla", "jax.nn xla"}
    for one in here.values():
        expected = kinds.exact(given[0])
        results = one.results(kinds.first_lane(given[0].gradient))
        assert results.keys() == expected.keys() == {"output", *kinds.GRADIENTS}
        assert kinds.error(results, expected) < 2e-6
        assert kinds.error(one.results(given[0].gradient), expected) > 1e-2, "all lanes' bias"
        assert kinds.deterministic(one, given[0].gradient) and one.memory > 0
    assert found["jax.nn cudnn"] == "runs on gpu, not on cpu"


def test_a_bound_knows_neither_bias_nor_cached_block(tool: Callable) -> None:
    import jax

    kinds, room = tool("attention_kinds"), tool("attention_jax")
    sizes = kinds.Sizes(lanes=1, tokens=24, window=8, heads=2, head_dim=4, dtype="float32")
    one = kinds.inputs(sizes)

    def plain(*x: jax.Array, **options: Any) -> jax.Array:
        return jax.nn.dot_product_attention(*x, scale=1.0, implementation="xla", **options)

    output = room.windowed(plain, one[:2], *(jax.numpy.asarray(x) for x in one[2:-1]))
    np.testing.assert_allclose(output[0], kinds.exact(one, biased=False)["output"], atol=2e-6)


def run(script: str, *flags: str) -> str:
    """Runs a script of tools/benchmark and returns what it prints."""
    done = subprocess.run(
        [sys.executable, TOOLS / script, *flags], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow  # Runs commands as processes; quick tests cover what the commands call.
def test_processes_take_turns_and_who_is_absent_is_named(tmp_path: Path) -> None:
    sizes = "--lanes=1", "--tokens=32", "--window=8", "--heads=2", "--head_dim=8"
    flags = "--dtype=float32", "--rounds=2", "--only=brt,torch", f"--json={tmp_path / 'rows'}"
    out = run("attention.py", *sizes, *flags)
    found = json.loads((tmp_path / "rows").read_text())["found"]
    rows = {row["kind"]: row for row in found["rows"]}
    assert rows["brt xla"]["of brt xla"] == 1
    assert all(row["both ms"] > 0 and float(row["max error"]) < 1e-5 for row in rows.values())
    for name in found["absent"]:
        assert f"absent: {name} (" in out
    assert "brt pallas_tpu" in found["absent"] and ("torch" in found["absent"]) != (
        "torch sdpa" in rows
    )


@pytest.mark.slow
def test_train_steps_take_turns(tmp_path: Path) -> None:
    run(
        "train_step.py", "--size=small", "--tokens=128", "--rounds=1", "--models=Slide:13L",
        "--implementations=window_attention:xla,reference", "--dtype=float32",
        f"--json={tmp_path / 'rows'}",
    )  # fmt: skip
    rows = json.loads((tmp_path / "rows").read_text())["found"]["rows"]
    assert [row["kind"] for row in rows] == ["Slide:13L, xla", "Slide:13L, reference"]
    assert rows[0]["of xla"] == rows[0]["of Slide:13L"] == 1
    assert all(row["tokens/s"] > 0 and row["MiB"] > 1 for row in rows)


@pytest.mark.slow
def test_saving_is_measured_beside_the_same_steps(tmp_path: Path) -> None:
    run(
        "saving.py", "--size=small", "--tokens=64", "--steps=3", "--rounds=1", "--every=10",
        f"--json={tmp_path / 'rows'}",
    )  # fmt: skip
    (row,) = json.loads((tmp_path / "rows").read_text())["found"]
    assert row["waits s"] > 0 and row["checksums s"] > 0 and row["state MB"] > 1
    share = 100 * row["save adds s"] / (row["step ms"] / 1e3 * 10)
    assert row["share %"] == pytest.approx(share)


def test_the_products_of_a_step_are_found_as_often_as_they_run(tool: Callable) -> None:
    alone = tool("products_alone")
    square, batch, tall = jnp.ones((8, 8)), jnp.ones((2, 8, 4)), jnp.ones((8, 24))

    def step(square: jax.Array, batch: jax.Array, tall: jax.Array) -> tuple[jax.Array, ...]:
        looped = jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ x), square)
        return looped, jnp.einsum("bmk,bml->bkl", batch, batch), jnp.tanh(tall.T) @ square

    lowered = jax.jit(step).lower(square, batch, tall)
    found = alone.products(lowered.compile().as_text())
    assert sorted(found.values()) == [1, 1, 3]
    sizes = {product.flops: times for product, times in found.items()}
    assert sizes == {2 * 8 * 8 * 8: 3, 2 * 2 * 4 * 8 * 4: 1, 2 * 24 * 8 * 8: 1}
    results = jax.jit(alone.program(found)[0])(alone.program(found)[1])
    assert sorted(y.size for y in results) == [32, 64, 64, 64, 192]


@pytest.mark.slow
def test_linear_recurrences_take_turns_with_a_window(tmp_path: Path) -> None:
    run("linear_recurrences.py", "--rounds=1", f"--json={tmp_path / 'rows'}")
    rows = json.loads((tmp_path / "rows").read_text())["found"]
    assert [row["model"] for row in rows][:2] == ["Slide", "Rec:fixed:skip"] and len(rows) == 5
    assert rows[0]["ratio"] == rows[0]["relative_flops"] == 1
    assert all(row["milliseconds"] > 0 for row in rows)


# Python 3.13 warns of a type that jaxlib makes, and jaxlib ends the process if that is an error.
@pytest.mark.filterwarnings("ignore:builtin type .* has no __module__:DeprecationWarning")
def test_the_kernels_of_a_profile_stand_beside_their_bounds(tool: Callable, tmp_path: Path) -> None:
    session = tool("gpu_session")
    x = jnp.ones((256, 256))

    def step(x: jax.Array) -> jax.Array:
        with jax.named_scope("mlp"):
            return jnp.tanh(x @ x)

    compiled = jax.jit(step).lower(x).compile()
    with jax.profiler.trace(str(tmp_path)):
        jax.block_until_ready([compiled(x) for _ in range(session.STEPS)])
    (file,) = tmp_path.rglob("*.xplane.pb")
    times = session.kernel_times(jax.profiler.ProfileData.from_file(str(file)))
    rows = session.beside_bounds(times, compiled.as_text())
    assert {row["part"] for row in rows} == {"MLP and output"}
    assert sum(row["TFLOP"] for row in rows) == 2 * 256**3 / 1e12
    assert all(row["times"] == 1 and row["ms"] > 0 and row["bound ms"] > 2e-3 for row in rows)


def test_a_session_keeps_finished_parts_and_says_what_is_missing(
    tool: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    session = tool("gpu_session")
    monkeypatch.setattr(session, "HERE", tmp_path)
    part = "import sys, pathlib as p; p.Path(sys.argv[-1][7:]).write_text('[1]'); print('runs')"
    (tmp_path / "good.py").write_text(part)
    (tmp_path / "bad.py").write_text("raise SystemExit('no such device')")
    (tmp_path / "slow.py").write_text("import time; time.sleep(60)")
    files = {name: [f"{name}.py"] for name in ("good", "bad")}
    monkeypatch.setattr(session, "commands", lambda _: files)
    args = argparse.Namespace(run=None, parts="", out=tmp_path / "out", seconds=60.0)
    for printed in ("runs", "good: is there"):
        assert session.main(args) == 1
        assert printed in capsys.readouterr().out
        found = json.loads((tmp_path / "out/session.json").read_text())
        assert found == {"parts": {"good": [1]}, "missing": {"bad": "no such device"}}
    assert session.run_part("slow", ["slow.py"], tmp_path, 0.2) == "its 0 s were over"
    with pytest.raises(ConfigError, match=r"--parts=fast is not known; the parts are good, bad"):
        session.main(argparse.Namespace(**vars(args) | {"parts": "fast"}))


@pytest.mark.slow
def test_a_lever_is_measured_in_turns_with_the_usual_step(
    tool: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = tool("gpu_session")
    changes = {"stores transposes": {"stores_transposes": False}, "unknown": {"no_field": True}}
    monkeypatch.setattr(session, "LEVERS", {n: (x, {}, []) for n, x in changes.items()})
    small = dataclasses.replace(tool("table1_step").SIZES["small"], layers=3, window=8)
    monkeypatch.setitem(tool("table1_step").SIZES, "small", small)
    args = argparse.Namespace(size="small", tokens=16, dtype="float32", rounds=1, json=None)
    rows, model = session.levers(args)
    assert rows[0]["ms"] > 0 and rows[0]["GiB"] > 0 and model.dropout == 0.05
    assert "no_field" in rows[1]["cannot run"]
