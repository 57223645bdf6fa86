"""Tests training and evaluation commands on a memory task."""

import json
from pathlib import Path

import pytest

from brt.training.metrics import read_metrics

from .conftest import Commands

TASK = "memory:copy/train/64?distance=12,40&length=3"


@pytest.mark.slow
def test_answers_are_counted_on_the_way_and_in_the_end(commands: Commands, tmp_path: Path) -> None:
    run, found = tmp_path / "run", tmp_path / "found.json"
    bindings = (
        f"Data.train = '{TASK}'", "Data.validation = ()", "Data.test = ()",
        "Memorizing.layers = ()", "Training.steps = 12", "Training.plots = True",
    )  # fmt: skip
    trained = commands.train(run, *bindings)
    assert "asks for facts from 40 bytes before" in trained.err, "a segment is 16"
    assert "% of the answers" in trained.err
    last = read_metrics(run / "metrics.jsonl")[-1]
    assert 0 <= last["eval/validation/answers_exact"] <= 100
    assert last["eval/validation/answer_bits_per_byte"] > 0
    farther = "Data.test = 'memory:copy/test/6?distance=12,40,100&length=3'"
    evaluated = commands.run(
        "evaluate", f"--workdir={run}", f"--gin_bindings={farther}", f"--json={found}",
        "--ablate=state",
    )  # fmt: skip
    report = json.loads(found.read_text())
    rows = [(row["windows"], row["answers_read"]) for row in report["answers"]]
    assert rows == [(2, 2), (8, 2), (16, 2)]
    assert report["ablation"]["answers"][0]["answer_bits_per_byte"] > 0
    for label in ("up to 2 windows", "up to 16 windows", "all", "the rest of the text"):
        assert any(line.startswith(label) for line in evaluated.out.splitlines())
    assert (run / "plots/test.png").read_bytes().startswith(b"\x89PNG")
    refused = commands.train(
        tmp_path / "other", "Data.train = 'memory:copy/train/9?size=8&distance=96'", code=3
    )
    assert "distance=96 lies beyond its size=8 bytes" in refused.err
