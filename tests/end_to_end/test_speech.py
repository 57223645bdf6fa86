"""Tests the commands on a speech recognizer, from generated utterances to transcripts."""

import json
from pathlib import Path

import pytest

from .conftest import SMALL, Commands

pytestmark = pytest.mark.slow

CONFIG = f"""{SMALL}
Training.task = 'speech_recognition'
Training.evaluate_every = 8
Training.plots = False
Model.positions = 'sinusoidal'
Model.dropout = 0.1
Attention.kind = 'improved_clustered'
Attention.clusters = 4
Attention.top_k = 4
Data.train = 'generated:train/10'
Data.validation = 'generated:validation/3'
Data.test = 'generated:test/5'
Speech.stack = 3
Speech.time_masks = (1, 20)
Speech.feature_masks = (1, 8)
Evaluation.batch_size = 3
"""


@pytest.fixture(scope="module")
def recogniser(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the directory of a run that was stopped by a signal and then resumed."""
    place = tmp_path_factory.mktemp("recogniser")
    (place / "speech.gin").write_text(CONFIG)
    stop = "hook('brt.training.run.put', 5, send(signal.SIGTERM))"
    flags = f"--gin_file={place / 'speech.gin'}", f"--workdir={place / 'run'}"
    commands.run("train", *flags, hook=stop, code=75)
    done = commands.run("train", *flags)
    assert "resuming" in done.err and "improved_clustered" in done.out
    table = [line.split()[0] for line in done.out.splitlines() if line.count("%") == 2]
    assert table == ["improved_clustered", "full"], "both attentions, the same weights"
    return place / "run"


def test_training_leaves_figures_and_a_transcript(recogniser: Path) -> None:
    records = [json.loads(line) for line in (recogniser / "metrics.jsonl").read_text().splitlines()]
    losses = [r["train/loss"] for r in records if "train/loss" in r]
    assert losses[-1] < losses[0]
    tags = {tag for record in records for tag in record if tag.startswith("eval/")}
    assert tags == {
        f"eval/validation/{name}"
        for name in ("token_error_rate", "word_error_rate", "bits_per_token", "bits_per_byte",
                     "token_error_rate_full")
    }  # fmt: skip
    sample = (recogniser / "samples/00000008.txt").read_text()
    assert sample.startswith("validation-00000: ") and "said:" in sample and "heard:" in sample


def test_evaluation_with_another_attention_and_beams(
    commands: Commands, recogniser: Path, tmp_path: Path
) -> None:
    done = commands.run(
        "evaluate", f"--workdir={recogniser}", "--split=test", f"--json={tmp_path}/report",
        "--gin_bindings=Attention.kind = 'oracle_top_k'", "--gin_bindings=Decoding.beams = 3",
    )  # fmt: skip
    report = json.loads((tmp_path / "report").read_text())
    assert "3 beams, trained with improved_clustered attention" in done.out
    assert (report["attention"], report["trained_with"]) == ("oracle_top_k", "improved_clustered")
    assert report["audio_seconds"] > 5 and report["seconds"] > 0
    directory = recogniser / "evaluations/8"
    kept = json.loads((directory / "test_oracle_top_k.json").read_text())
    assert kept.items() <= report.items() and report.keys() - kept.keys() == {"run", "version"}
    lines = (directory / "test_oracle_top_k_predictions.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["id"] for row in rows] == [f"test-{i:05}" for i in range(5)]
    assert report["token_errors"] == {
        key: sum(row["token_errors"][key] for row in rows) for key in report["token_errors"]
    }
