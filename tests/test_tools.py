"""Tests that what the scripts under tools/ import from brt exists, and that tools/results.py
collects and compares the runs of a sweep.
"""

import ast
import importlib
import json
import shutil
from pathlib import Path

import pytest

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
    lines = results.table(found, "Slide:7L").splitlines()
    assert lines[2].startswith("| Rec | 4 | 32 | 0 | 256 | 2.8000 | 2.8000 | -0.2000 (")
    assert next(line for line in lines if "Slide:6L" in line).endswith("|  |  |")
    pooled = results.compared(found["runs"], "Rec", "Slide:7L")
    assert pooled.value == pytest.approx(-0.2) and pooled.half_width > 0
    assert results.compared(found["runs"], "Slide:6L", "Slide:7L") is None
    assert results.plot([found], "Rec", "Slide:7L").startswith(b"\x89PNG")
    assert found["runs"][0]["training"] == [[64, 3.0], [128, 2.0]]
    shutil.rmtree(tmp_path / "Slide:6L,seed=2/evaluations")
    stopped = results.collected([tmp_path], "made up")
    assert [run["name"] for run in stopped["training_only"]] == ["Slide:6L"]
    assert len(stopped["runs"]) == 4
