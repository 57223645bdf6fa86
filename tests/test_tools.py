"""Tests that what the scripts under tools/ import from brt exists, that tools/results.py collects
and compares the runs of a sweep, and that tools/tables.py writes tables of them into pages.
"""

import ast
import importlib
import io
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from brt.layers.kinds import KINDS

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted(ROOT.glob("tools/**/*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_what_a_script_imports_is_there(script: Path) -> None:
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("brt"):
            module = importlib.import_module(node.module)
            for name in (alias.name for alias in node.names):
                if not hasattr(module, name):
                    importlib.import_module(f"{node.module}.{name}")


def write_run(sweep: Path, name: str, seed: int, bits: tuple[float, ...]) -> None:
    """Writes what tools/results.py reads of a run, whose documents have 100 bytes."""
    directory = sweep / f"{name},seed={seed}"
    evaluation = directory / "evaluations/8"
    evaluation.mkdir(parents=True)
    training = {"seed": seed, "steps": 8, "batch_size": 2, "segment_length": 16}
    config = {"Training": training, "Model": {"model_dim": 4}}
    config["Optimizer"] = {"learning_rate": 0.01}
    point = {"name": directory.name, "config": config}
    (directory / "point.json").write_text(json.dumps(point))
    metrics = [{"step": step, "train/bits_per_token": 4.0 - step / 2} for step in (2, 4)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    (directory / "provenance.json").write_text(json.dumps({"versions": {"jax": "1"}}))
    per_byte = sum(bits) / (100 * len(bits))
    report = {"bits_per_byte": per_byte, "bits_per_token": per_byte}
    (evaluation / "test.json").write_text(json.dumps(report))
    rows = [
        {"document": f"d{i}.txt", "bits": own, "bytes": 100, "tokens": 100}
        for i, own in enumerate(bits)
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (evaluation / "test_documents.jsonl").write_text(lines)


def test_results_compare_models_of_the_same_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    results = importlib.import_module("results")
    for seed, shift in ((0, 0.0), (1, 50.0)):
        write_run(tmp_path, "Slide:7L", seed, (200 + shift, 300 + shift, 400 + shift))
        write_run(tmp_path, "Rec", seed, (190 + shift, 280 + shift, 370 + shift))
    write_run(tmp_path, "Slide:6L", 2, (200.0, 300.0, 400.0))  # No other run has this seed.
    found = json.loads(json.dumps(results.collected([tmp_path], "made up")))
    assert [run["tokens"] for run in found["runs"]] == [256] * 5
    compared = importlib.import_module("results_plot").compared
    pooled = compared(found["runs"], "Rec", "Slide:7L")
    assert pooled.value == pytest.approx(-0.2) and pooled.half_width > 0
    assert compared(found["runs"], "Slide:6L", "Slide:7L") is None
    assert results.plot([found], "Rec", "Slide:7L").startswith(b"\x89PNG")
    assert found["runs"][0]["training"] == [[64, 3.0], [128, 2.0]]
    shutil.rmtree(tmp_path / "Slide:6L,seed=2/evaluations")
    stopped = results.collected([tmp_path], "made up")
    assert [run["name"] for run in stopped["training_only"]] == ["Slide:6L"]
    assert len(stopped["runs"]) == 4


def paired_runs(*shifts: float) -> list[dict[str, Any]]:
    """Returns runs of the models Rec and Slide, whose bits differ by a shift for each seed."""
    bits = {"Slide": (200.0, 300.0, 400.0), "Rec": (191.0, 290.0, 389.0)}
    return [
        {
            "name": name, "seed": seed, "width": 4, "tokens": 8, "tokens_per_step": 8,
            "documents": [{"bits": x + shift * (name == "Rec"), "bytes": 100} for x in own],
        }
        for seed, shift in enumerate(shifts)
        for name, own in bits.items()
    ]  # fmt: skip


def test_seeds_that_disagree_widen_an_interval_that_agreeing_ones_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    compared = importlib.import_module("results_plot").compared
    one, agreeing, apart = (
        compared(paired_runs(*shifts), "Rec", "Slide")
        for shifts in ((0.0,), (0.0, 0.0), (-5.0, 5.0))
    )
    assert one.value == pytest.approx(agreeing.value) == pytest.approx(apart.value)
    assert agreeing.half_width == pytest.approx(one.half_width)
    # Two seeds, 0.1 bits per byte apart: their mean has a standard error of 0.05.
    assert apart.half_width > 0.05 * 4
    shown = importlib.import_module("tables").shown
    assert "*" not in shown(one) + shown(apart, several_seeds=True)
    assert shown(agreeing, several_seeds=True).startswith("**-0.100")


def test_a_table_that_is_not_that_of_its_file_is_found_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    tables = importlib.import_module("tables")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    (tmp_path / "docs/results").mkdir(parents=True)
    (tmp_path / "README.md").write_text("Nothing.\n")
    row = {"model": "Slide", "parameters": 1000, "carried": 20, "flops": 30}
    (tmp_path / "docs/results/sizes.json").write_text(json.dumps([row]))
    page = tmp_path / "docs/page.md"
    page.write_text("Before.\n<!-- table memory_kinds sizes -->\n| old |\n<!-- end -->\nAfter.\n")
    assert tables.main(["--check"]) == 1 and "docs/page.md" in capsys.readouterr().err
    assert "| old |" in page.read_text()
    assert tables.main([]) == 0 and tables.main(["--check"]) == 0
    assert "| Slide | 1,000 | 20 | 30 |\n<!-- end -->\nAfter." in page.read_text()


def test_what_was_recorded_or_printed_is_shown_with_its_conditions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    tables = importlib.import_module("tables")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    place = tmp_path / "docs/results"
    (place / "recorded").mkdir(parents=True)
    old = {"command": "run", "date": "2026-01-02", "conditions": "one seed", "heads": ["a", "b"]}
    (place / "recorded/old.json").write_text(json.dumps(old | {"rows": [["1", "2"]]}))
    assert tables.recorded("old").endswith("| 1 | 2 |\n\n2026-01-02, `run`: one seed.")
    (place / "said.txt").write_text(f"# run\nfirst\nsecond {'x' * 200}\nlast\n")
    assert tables.output("said", "^l", "irs").splitlines() == ["```", "first", "last", "```"]
    whole = tables.output("said")
    assert "# run" not in whole and max(map(len, whole.splitlines())) < 120


def test_a_document_of_code_has_the_sources_of_a_project_in_the_order_of_their_paths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    document = importlib.import_module("code_corpus").document
    files = {"z/b.py": b"b\r\n", "z/a/c.rs": b"c\n", "z/tests/d.py": b"d\n", "z/e.png": b"e"}
    files |= {"z/empty.py": b"", "z/large.c": b"l" * 300_000}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    assert document(packed.getvalue()) == b"===== a/c.rs =====\nc\n\n===== b.py =====\nb\n"


@pytest.mark.slow
def test_the_models_of_the_memory_sweep_have_every_kind_and_about_one_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    rows = importlib.import_module("memory_kinds").rows(str(ROOT / "configs/sweeps/memory.gin"))
    found = {kind for row in rows for kind in row.config.model.layer_types}
    # One section may configure several kinds, such as dense memory with and without a gate.
    assert {KINDS[kind].section for kind in found} == {kind.section for kind in KINDS.values()}
    sizes = [row.parameters for row in rows]
    assert max(sizes) <= 1.05 * min(sizes)
