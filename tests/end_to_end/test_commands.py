"""Tests the commands on one language model, from text files to the continuation of a text."""

import json
import shutil
from pathlib import Path

import pytest
from tiny_runs import state_hash

from brt import command_line, evaluate, inspect, train, tree_utils
from brt.checkpointing import reader
from brt.errors import CheckpointError, NonFiniteError
from brt.training.metrics import read_metrics

from .conftest import LENGTHS, Commands

TOKENS = sum(LENGTHS.values())


def test_training_leaves_what_its_summary_names(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = read_metrics(trained / "metrics.jsonl")
    assert [r["step"] for r in records] == [5, 10, 12, 15, 20, 24]
    assert records[-1]["train/loss"] < records[0]["train/loss"]
    evaluated = [r["step"] for r in records if "eval/validation/bits_per_byte" in r]
    assert evaluated == [12, 24]
    log = (trained / "log.txt").read_text()
    assert "first step " in log and ", compiling " in log
    samples = sorted(path.name for path in (trained / "samples").iterdir())
    assert samples == ["00000012.txt", "00000024.txt"]
    assert reader.steps(trained / "checkpoints") == [16, 20, 24]
    train.main(train.parser().parse_args([f"--workdir={trained}"]))  # This uses the saved config.
    again = capsys.readouterr()
    assert "step 24 of 24 is done already" in again.err
    for line in ("Step 24", "python -m brt.evaluate", "python -m brt.generate"):
        assert line in again.out


@pytest.mark.slow  # This test runs commands as processes; quick tests cover what commands call.
def test_evaluation_reports_every_token(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [f"--workdir={trained}", "--ablate=state", f"--json={tmp_path}/e.json"]
    evaluate.main(evaluate.parser().parse_args(flags))
    said = capsys.readouterr()
    report = json.loads((tmp_path / "e.json").read_text())
    assert (report["step"], report["tokens"], report["bytes"]) == (24, TOKENS, TOKENS)
    assert report["bits_per_byte"] == report["bits_per_token"]
    assert 2 < report["bits_per_byte"] < 8, "it has learned which letters there are"
    assert report["ablation_costs_bits_per_byte"] == pytest.approx(
        report["ablation"]["bits_per_byte"] - report["bits_per_byte"]
    )
    assert f"{report['bits_per_byte']:.4f}" in said.out and "window 8, segment 16" in said.out
    rows = (trained / "evaluations/24/test_documents.jsonl").read_text().splitlines()
    assert sum(json.loads(row)["bits"] for row in rows) == pytest.approx(report["bits"])
    assert said.err == "", "progress is for terminals"


def test_inspection_shows_a_run(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def show(workdir: Path, *flags: str) -> str:
        inspect.main(inspect.parser().parse_args([f"--workdir={workdir}", *flags]))
        return capsys.readouterr().out

    shown = show(trained, f"--json={tmp_path}/i.json")
    for line in ("step         24", "whole", "Model.window = 8", "train/loss", "commit"):
        assert line in shown
    assert "Training.seed" not in shown, "that is the default"
    found = json.loads((tmp_path / "i.json").read_text())
    assert (found["steps"], found["step"], found["seed"]) == ([16, 20, 24], 24, 0)
    assert found["parameters"] - found["parameters_non_embedding"] == 256 * 16
    assert all(entry["whole"] for entry in found["checkpoints"])
    newest = show(trained, "--state_hash")
    assert newest == state_hash(trained) + "\n"
    assert show(trained, "--state_hash", "--step=20") != newest

    damaged = tmp_path / "damaged"
    shutil.copytree(trained, damaged)
    (damaged / "checkpoints/24/meta.json").write_text("{}")
    with pytest.raises(CheckpointError, match="24 of .* is damaged: meta.json is .* from 20$"):
        show(damaged, f"--json={tmp_path}/d.json")
    shown = capsys.readouterr().out
    assert "DAMAGED: meta.json is damaged" in shown and "step 20: " in shown
    found = json.loads((tmp_path / "d.json").read_text())
    assert [entry["whole"] for entry in found["checkpoints"]] == [True, True, False]
    assert found["step"] == 20
    with pytest.raises(CheckpointError, match=r"these are whole: \[16, 20\]$"):
        show(damaged, "--state_hash", "--step=24")
    assert capsys.readouterr().out == "", "no hash of another step"
    assert "step 16: " in show(damaged, "--step=16")
    with pytest.raises(
        CheckpointError, match=r"has no checkpoint of step 7; it has \[16, 20, 24\]"
    ):
        show(trained, "--step=7")


def test_a_dry_run_sizes_the_checkpoint_and_writes_nothing(
    commands: Commands, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--dry_run", f"--gin_file={commands.config}", f"--workdir={tmp_path}/run"]
    train.main(train.parser().parse_args([*flags, f"--json={tmp_path}/dry.json"]))
    figures = json.loads((tmp_path / "dry.json").read_text())
    arrays = reader.read_meta(trained / "checkpoints", 24)["arrays"]
    expected = tree_utils.required_bytes(tree_utils.abstract(arrays))
    assert figures["checkpoint_bytes"] == expected
    assert f"checkpoint_bytes          {expected:,}" in capsys.readouterr().out
    assert figures["tokens_per_step"] == 64 and figures["steps_per_epoch"] == 16
    assert not (tmp_path / "run").exists()


def test_an_implementation_that_cannot_run_here_ends_in_one_sentence(
    commands: Commands, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    flags = [
        f"--gin_file={commands.config}", f"--workdir={tmp_path}/run",
        "--gin.Kernels.use='window_attention=pallas_gpu'",
    ]  # fmt: skip
    monkeypatch.setattr("sys.argv", ["train", *flags])
    with pytest.raises(SystemExit) as stop:
        command_line.main(train.main, train.parser())
    said = capsys.readouterr().err
    sentence = "brt: error: window_attention cannot run by 'pallas_gpu': runs on gpu, not on"
    assert stop.value.code == 2 and sentence in said.splitlines()[-1]
    assert not (tmp_path / "run").exists()


@pytest.mark.slow  # This test runs commands as processes; quick tests cover what commands call.
def test_a_run_that_explodes_stops_and_saves_nothing_of_it(
    commands: Commands, tmp_path: Path
) -> None:
    done = commands.train(
        tmp_path, "Optimizer.learning_rate = 1e30", "Checkpoint.every = 1", "Model.layers = 1",
        "Recurrence.layers = ()", "Memorizing.layers = ()", "Model.dropout = 0.0",
        code=NonFiniteError.exit_code,
    )  # fmt: skip
    assert "NaN or infinity" in done.err or "is not finite" in done.err
    for step in reader.steps(tmp_path / "checkpoints"):
        state = reader.restore(tmp_path / "checkpoints", step=step).state
        assert tree_utils.not_finite(state) == []


@pytest.mark.parametrize(
    "name",
    [
        "train",
        *(pytest.param(n, marks=pytest.mark.slow)
          for n in ("evaluate", "generate", "inspect", "prepare")),
    ],
)  # fmt: skip
def test_help_is_quick(name: str, commands: Commands) -> None:
    assert f"python -m brt.{name}" in commands.run(name, "--help").out
    assert "jax" not in vars(command_line)
