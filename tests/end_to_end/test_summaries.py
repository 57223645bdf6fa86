"""Tests the commands on a summarizer, from a file of pairs to summaries."""

import json
import random
from pathlib import Path

import pytest
from tiny_runs import state_hash

from .conftest import Commands

pytestmark = pytest.mark.slow

WORDS = "the ship sails at dawn over cold water while old men sing of gold and storms".split()
CONFIG = """
Training.task = 'summarization'
Training.steps = 12
Training.batch_size = 4
Training.gradient_accumulation = 2
Training.log_every = 4
Training.evaluate_every = 6
Training.sample_every = 6
Training.label_smoothing = 0.1
Training.plots = False
Seq2Seq.encoder_layers = 1
Seq2Seq.decoder_layers = 1
Model.model_dim = 16
Model.heads = 2
Model.head_dim = 8
Model.mlp_dim = 32
Attention.kind = 'improved_clustered'
Attention.clusters = 8
Attention.top_k = 4
CrossAttention.kind = 'srformer'
CrossAttention.segment_size = 8
CrossAttention.q_ref = 12
Data.train = '{train}'
Data.validation = '{validation}'
Data.test = '{test}'
Data.tokenizer = 'train:300'
Pairs.max_source_length = 48
Pairs.max_target_length = 12
Data.buckets = (24, 48)
Decoding.max_length = 8
Decoding.beams = 2
Evaluation.batch_size = 4
Optimizer.name = 'adamw'
Optimizer.learning_rate = 0.01
Optimizer.schedule = 'constant'
Optimizer.warmup_steps = 2
Checkpoint.every = 3
"""
COUNTS = {"train": 22, "validation": 5, "test": 6}


@pytest.fixture(scope="module")
def gin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a config with random documents, whose summaries are their first words."""
    directory, draw = tmp_path_factory.mktemp("pairs"), random.Random(0)
    for split, count in COUNTS.items():
        rows = []
        for i in range(count):
            text = draw.choices(WORDS, k=draw.choice([6, 12, 30]))
            row = {"id": f"{split}-{i}", "document": " ".join(text), "summary": text[0]}
            rows.append(json.dumps(row))
        (directory / f"{split}.jsonl").write_text("\n".join(rows) + "\n")
    path = directory / "summarise.gin"
    path.write_text(CONFIG.format(**{s: directory / f"{s}.jsonl" for s in COUNTS}))
    return path


@pytest.fixture(scope="module")
def summariser(commands: Commands, gin: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains a summarizer and returns the run's directory."""
    workdir = tmp_path_factory.mktemp("summariser") / "run"
    done = commands.run("train", f"--gin_file={gin}", f"--workdir={workdir}")
    assert "a batch of another shape" in done.err, "there are two lengths of documents"
    assert "5 documents; ROUGE, protocol hf" in done.out, "summaries beside their references"
    assert "reference" in done.out and "mine.jsonl" in done.out
    return workdir


def test_a_resumed_summariser_is_bit_identical(
    commands: Commands, gin: Path, summariser: Path, tmp_path: Path
) -> None:
    hook = 'hook("brt.training.run.put", 8, send(signal.SIGKILL))'
    flags = f"--gin_file={gin}", f"--workdir={tmp_path / 'run'}"
    commands.run("train", *flags, hook=hook, code=-9)
    done = commands.run("train", *flags)
    assert "from step 6" in done.err or "from step 3" in done.err
    assert state_hash(tmp_path / "run") == state_hash(summariser)


def test_the_loss_falls_and_the_looks_are_recorded(summariser: Path) -> None:
    records = [json.loads(line) for line in (summariser / "metrics.jsonl").read_text().splitlines()]
    losses = [r["train/loss"] for r in records if "train/loss" in r]
    assert losses[-1] < losses[0]
    last = records[-1] | records[-2]
    assert {"eval/validation/rougeL", "eval/validation/bits_per_token"} <= set(last)
    assert (summariser / "samples/00000006.txt").read_text().startswith("validation-0\n")


def test_evaluation_writes_a_prediction_for_every_pair(
    commands: Commands, summariser: Path, tmp_path: Path
) -> None:
    flags = f"--workdir={summariser}", "--split=test", f"--json={tmp_path}/report.json"
    done = commands.run("evaluate", *flags, "--gin_bindings=Decoding.beams = 1")
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["pairs"], report["step"], report["decoding"]["beams"]) == (6, 12, 1)
    assert report["protocol"]["name"] == "hf" and "greedy" in done.out
    lines = (summariser / "evaluations/12/test_predictions.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["id"] for row in rows] == [f"test-{i}" for i in range(6)]
    assert all(row["prediction_tokens"] <= 7 for row in rows), "the start counts"
    assert report["truncation"]["documents"] == sum(row["cut_tokens"] > 0 for row in rows)


def test_one_document_is_summarised(commands: Commands, summariser: Path) -> None:
    text = " ".join(WORDS * 8)
    done = commands.run("generate", f"--workdir={summariser}", f"--prompt={text}")
    assert done.out.count("\n") == 1
    assert "Pairs.max_source_length is the limit" in done.err


@pytest.mark.parametrize(
    ("command", "flags", "code", "said"),
    [
        ("evaluate", ["--ablate=state"], 2, "--ablate=state is for language models"),
        ("evaluate", ["--gin_bindings=CrossAttention.kind = 'full'"], 2, "another run"),
        ("evaluate", ["--gin_bindings=CrossAttention.q_ref = 5"], 2, "is longer than CrossAttent"),
    ],
)
def test_what_makes_no_sense_is_refused(
    commands: Commands, summariser: Path, command: str, flags: list[str], code: int, said: str
) -> None:
    done = commands.run(command, f"--workdir={summariser}", *flags, code=code)
    assert said in done.err
    assert done.err.count("\n") == 1


def test_a_trained_summariser_goes_to_hugging_face_and_back(
    commands: Commands, gin: Path, summariser: Path, tmp_path: Path
) -> None:
    there, back = tmp_path / "hf", tmp_path / "brt"
    done = commands.run("convert", "--from=brt", str(summariser), "--to=hf", str(there), "--verify")
    assert "srformer" in done.out and (there / "spiece.model").is_file()
    commands.run("convert", "--from=hf", str(there), "--to=brt", str(back), "--verify")
    flags = [
        f"--gin_file={gin}", f"--gin_bindings=Training.init_from = '{back}'",
        f"--gin_bindings=Data.tokenizer = '{back}/spiece.model'",
        "--gin_bindings=Training.label_smoothing = 0.0", "--gin_bindings=Training.steps = 3",
        "--gin_bindings=Training.log_every = 3", "--gin_bindings=Training.evaluate_every = 0",
        "--gin_bindings=Training.sample_every = 0",
    ]  # fmt: skip
    commands.run("train", *flags, f"--workdir={tmp_path}/on")
    first = json.loads((tmp_path / "on/metrics.jsonl").read_text().splitlines()[0])
    before = [json.loads(x) for x in (summariser / "metrics.jsonl").read_text().splitlines()]
    assert first["train/loss"] < before[0]["train/loss"] - 0.5, "it begins where the other ended"
    wrong = commands.run(
        "train", *flags, f"--workdir={tmp_path}/no", "--gin_bindings=Model.heads = 4", code=2
    )
    assert "Model.heads = 4, but the weights" in wrong.err
