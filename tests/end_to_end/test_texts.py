"""Tests the commands that train and evaluate models for sentences and questions."""

import json
from pathlib import Path
from typing import Any

import pytest

from brt.tasks.extractive_qa import preparation as questions
from brt.tasks.text_classification import preparation as sentences

from .conftest import SMALL, Commands

pytestmark = pytest.mark.slow

CONFIG = f"""{SMALL}
Training.evaluate_every = 4
Training.plots = False
Model.positions = 'sinusoidal'
Model.dropout = 0.1
Evaluation.batch_size = 4
"""
CLUSTERED = """
Attention.kind = 'improved_clustered'
Attention.clusters = 4
Attention.top_k = 4
Data.tokenizer = 'train:320'
Data.max_length = 128
Questions.stride = 32
"""


def write_tsv(path: Path, source: str) -> None:
    """Writes generated sentences with class labels to a table."""
    rows = [f"{e.texts[0]}\t{e.label}\n" for e in sentences.examples(source)]
    path.write_text("sentence\tlabel\n" + "".join(rows))


def write_numbers(path: Path, source: str) -> None:
    """Writes generated sentences with the numbers that regression predicts."""
    rows = [{"sentence": e.texts[0], "score": len(e.label) / 2} for e in sentences.examples(source)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_squad(path: Path, source: str) -> None:
    """Writes generated questions in the format of SQuAD."""
    data = [
        {"context": q.context, "qas": [{"id": q.id, "question": q.text, "answers": [
            {"text": a.text, "answer_start": a.start} for a in q.answers]}]}
        for q in questions.questions(source)
    ]  # fmt: skip
    path.write_text(json.dumps({"version": "1.1", "data": [{"title": "", "paragraphs": data}]}))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a directory with the files of all tasks and a config for each task."""
    place = tmp_path_factory.mktemp("texts")
    for split, count in (("train", 12), ("validation", 5), ("test", 6)):
        write_tsv(place / f"{split}.tsv", f"generated:{split}/{count}")
        write_squad(place / f"{split}.json", f"generated:{split}/{count}")
        write_numbers(place / f"{split}.jsonl", f"generated:{split}/{count}")
    for objective, ending, more in (
        ("text_classification", "tsv", "Data.max_length = 64"),
        ("text_regression", "jsonl", "Data.max_length = 64"),
        ("extractive_qa", "json", CLUSTERED),
    ):
        own = [f"Training.task = '{objective}'", more]
        own += [f"Data.{s} = '{place}/{s}.{ending}'" for s in ("train", "validation", "test")]
        (place / f"{objective}.gin").write_text(CONFIG + "\n".join(own))
    return place


def train(commands: Commands, files: Path, objective: str) -> tuple[Path, set[str]]:
    """Trains a model and returns the run's directory and the tags of its metrics."""
    workdir = files / objective
    done = commands.run("train", f"--gin_file={files / f'{objective}.gin'}", f"--workdir={workdir}")
    table = [line.split()[0] for line in done.out.splitlines() if line.count(" %") in (1, 2)]
    assert "full" in table and ("improved_clustered" in table) == (objective == "extractive_qa")
    records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    losses = [r["train/loss"] for r in records if "train/loss" in r]
    assert losses[-1] < losses[0]
    return workdir, {tag for record in records for tag in record}


def predictions(workdir: Path, name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the report of an evaluation and its predictions."""
    directory = workdir / "evaluations/8"
    lines = (directory / f"{name}_predictions.jsonl").read_text().splitlines()
    report = json.loads((directory / f"{name}.json").read_text())
    assert report["score"] == report[report["score_name"]]
    return report, list(map(json.loads, lines))


def test_a_classifier_from_glues_files_to_predictions(commands: Commands, files: Path) -> None:
    workdir, tags = train(commands, files, "text_classification")
    names = ("accuracy", "matthews", "bits_per_label")
    assert {f"eval/validation/{name}" for name in names} <= tags
    assert (workdir / "samples/00000008.txt").read_text().startswith("0, '")
    report, rows = predictions(workdir, "validation")
    right = sum(row["label"] == row["prediction"] for row in rows)
    assert len(rows) == 5 and report["accuracy"] == pytest.approx(100 * right / 5)


def test_numbers_from_lines_to_predictions(commands: Commands, files: Path) -> None:
    workdir, tags = train(commands, files, "text_regression")
    names = ("pearson", "spearman", "root_mean_square_error", "bits_per_number")
    assert {f"eval/validation/{name}" for name in names} <= tags
    report, rows = predictions(workdir, "validation")
    errors = [row["number"] - row["prediction"] for row in rows]
    rmse = (sum(error**2 for error in errors) / 5) ** 0.5
    assert len(rows) == 5 and report["root_mean_square_error"] == pytest.approx(rmse)


def test_answers_from_squads_files_to_predictions_with_another_attention(
    commands: Commands, files: Path, tmp_path: Path
) -> None:
    workdir, tags = train(commands, files, "extractive_qa")
    names = ("exact_match", "f1", "bits_per_place", "exact_match_full")
    assert {f"eval/validation/{name}" for name in names} <= tags
    assert (workdir / "samples/00000008.txt").read_text().startswith("validation-00000: what is")
    commands.run(
        "evaluate", f"--workdir={workdir}", "--split=test", f"--json={tmp_path}/report",
        "--gin_bindings=Attention.kind = 'clustered'",
    )  # fmt: skip
    report, rows = predictions(workdir, "test_clustered")
    written = json.loads((tmp_path / "report").read_text())
    assert report.items() <= written.items()
    assert written.keys() - report.keys() == {"run", "version"}
    assert (report["attention"], report["trained_with"]) == ("clustered", "improved_clustered")
    assert [row["id"] for row in rows] == [f"test-{i:05}" for i in range(6)]
    assert report["f1"] == pytest.approx(100 * sum(row["f1"] for row in rows) / 6)
