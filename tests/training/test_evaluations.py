"""Tests the files that an evaluation writes into a run directory, and its progress lines."""

import json
import math
import os
from pathlib import Path

import pytest

from brt.errors import ConfigError
from brt.tasks.report import EvaluationResult
from brt.training import evaluations
from brt.training.workdir import Workdir

ROWS = {"documents": [{"document": "a", "bits": 1.5}, {"document": "b", "bits": 2.5}]}


def test_rows_text_and_last_the_figures_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order, replace = [], os.replace

    def recorded(name: str, target: str, **places: int) -> None:
        order.append(target)
        replace(name, target, **places)

    monkeypatch.setattr(os, "replace", recorded)
    result = EvaluationResult({"bits": 2.0}, "2.000 bits", ROWS, "2 documents\nand more")
    found = evaluations.write(Workdir(tmp_path), 7, "test", result)
    assert order == ["test_documents.jsonl", "test.txt", "test.json"]
    directory = tmp_path / "evaluations/7"
    lines = (directory / "test_documents.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line) for line in lines] == ROWS["documents"]
    assert found.report == {"step": 7, "bits": 2.0}
    assert json.loads((directory / "test.json").read_text("utf-8")) == found.report
    assert found.text == f"{tmp_path}, step 7, test: 2 documents\nand more"
    assert (directory / "test.txt").read_text("utf-8") == found.text + "\n"
    assert found.line == "step 7: test 2.000 bits"
    assert not list(tmp_path.rglob("*.partial"))
    # Another way of reading the split has files of its own.
    evaluations.write(Workdir(tmp_path), 7, "test", result._replace(name="_full"))
    assert sorted(path.name for path in directory.iterdir()) == sorted(
        [*order[:3], "test_full.json", "test_full.txt", "test_full_documents.jsonl"]
    )


def test_figures_are_told_before_they_are_written_and_json_has_no_nan(tmp_path: Path) -> None:
    (tmp_path / "evaluations").touch()
    told: list[str] = []
    result = EvaluationResult({"bits": 2.0, "more": math.nan}, "2", {"rows": [{"a": math.inf}]}, "")
    with pytest.raises(ConfigError, match="^cannot write to .*/evaluations/7: Not a directory"):
        evaluations.write(Workdir(tmp_path), 7, "test", result, lambda e: told.append(e.line))
    assert told == ["step 7: test 2"]
    (tmp_path / "evaluations").unlink()
    evaluations.write(Workdir(tmp_path), 7, "test", result)
    report = json.loads((tmp_path / "evaluations/7/test.json").read_text())
    assert report == {"step": 7, "bits": 2.0, "more": None}
    assert (tmp_path / "evaluations/7/test_rows.jsonl").read_text() == '{"a": null}\n'


def test_a_log_has_a_line_when_one_is_due(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with evaluations.display(5000, "reading test", "tok") as update:
        for seconds in (30, 59, 61, 119, 122):
            now[0] = float(seconds)
            update(1000)
    assert capsys.readouterr().err.splitlines() == [
        "reading test: 3,000 of 5,000 tokens",
        "reading test: 5,000 of 5,000 tokens",
    ]
