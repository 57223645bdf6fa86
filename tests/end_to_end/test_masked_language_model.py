"""Tests the commands on a masked language model, from documents to the evaluation."""

import json
from pathlib import Path

import pytest

from .conftest import SMALL, Commands

pytestmark = pytest.mark.slow

CONFIG = f"""{SMALL}
Training.task = 'masked_language_modeling'
Training.segment_length = 32
Training.evaluate_every = 4
Model.max_positions = 32
Model.dropout = 0.0
Attention.kind = 'improved_clustered'
Attention.clusters = 4
Attention.top_k = 8
"""


@pytest.fixture(scope="module")
def workdir(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains the model on the data of the other tests, and returns the run's directory."""
    place = tmp_path_factory.mktemp("masked")
    data = [line for line in commands.config.read_text().splitlines() if line.startswith("Data.")]
    (place / "masked.gin").write_text("\n".join([CONFIG, *data, ""]))
    flags = f"--gin_file={place / 'masked.gin'}", f"--workdir={place / 'run'}"
    done = commands.run("train", *flags)
    assert "bits per masked token (entropy of single tokens: 3." in done.out
    return place / "run"


def test_training_leaves_figures_a_sample_and_plots(workdir: Path) -> None:
    records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    bits = [r["eval/validation/bits_per_masked_token"] for r in records if "eval" in str(r)]
    assert len(bits) == 2 and 2 < bits[1] < bits[0] < 9
    assert [r["data/tokens"] for r in records if "data/tokens" in r][-1] < 8 * 4 * 6
    assert "[" in (workdir / "samples/00000008.txt").read_text()
    assert (workdir / "plots/bits_per_masked_token.png").is_file()


def test_evaluation_by_another_attention(commands: Commands, workdir: Path) -> None:
    done = commands.run(
        "evaluate", f"--workdir={workdir}", "--gin_bindings=Attention.kind = 'full'"
    )
    assert "attention full, trained with improved_clustered" in done.out
    report = json.loads((workdir / "evaluations/8/test.json").read_text())
    assert report["protocol"]["attention"]["kind"] == "full"
    assert 2 < report["bits_per_masked_token"] < 9
    rows = (workdir / "evaluations/8/test_documents.jsonl").read_text().splitlines()
    assert len(rows) == report["documents"] == 5


@pytest.mark.parametrize(
    ("command", "flags", "sentence"),
    [
        ("generate", ["--prompt=a"], "writes no text; python -m brt.evaluate shows"),
        ("evaluate", ["--gin_bindings=Model.heads = 4"], "Model.heads was 2 and is 4"),
    ],
)
def test_what_means_nothing_is_one_sentence(
    commands: Commands, workdir: Path, command: str, flags: list[str], sentence: str
) -> None:
    assert sentence in commands.run(command, f"--workdir={workdir}", *flags, code=2).err
