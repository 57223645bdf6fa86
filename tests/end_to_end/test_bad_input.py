"""Tests that bad input ends with one sentence that names it, and with the right exit code."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from brt import evaluate, generate, train
from brt.checkpointing import reader
from brt.errors import BrtError, CheckpointError, ConfigError, DataError

from .conftest import Commands


def refusal(command: ModuleType, error: type[BrtError], *flags: str) -> str:
    """Returns the one-sentence error with which a command refuses its flags."""
    with pytest.raises(error) as caught:
        command.main(command.parser().parse_args(flags))
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def refused(commands: Commands, tmp_path: Path) -> Callable[..., str]:
    """Returns a function that trains with bindings and returns the error of the refusal."""

    def train_refuses(error: type[BrtError], *bindings: str, workdir: Path | None = None) -> str:
        flags = [f"--gin_file={commands.config}", f"--workdir={workdir or tmp_path / 'run'}"]
        flags += [f"--gin_bindings={binding}" for binding in bindings]
        return refusal(train, error, *flags)

    return train_refuses


@pytest.fixture
def resumed(trained: Path, tmp_path: Path) -> Path:
    """Returns a copy of a finished run, which a test may change or resume."""
    return Path(shutil.copytree(trained, tmp_path / "resumed"))


def test_missing_and_empty_documents_are_refused_by_name(
    refused: Callable[..., str], tmp_path: Path
) -> None:
    assert "nothing.txt" in refused(DataError, "Data.train = 'nothing.txt'")
    glob = f"{tmp_path}/*.text"
    assert glob in refused(DataError, f"Data.train = '{glob}'")
    (tmp_path / "empty.txt").write_text("")
    message = refused(DataError, f"Data.train = '{tmp_path}/empty.txt'")
    assert "empty.txt" in message and "no text" in message
    (tmp_path / "books").mkdir()
    assert f"{tmp_path}/books" in refused(DataError, f"Data.train = '{tmp_path}/books'")


def test_configs_that_cannot_work(refused: Callable[..., str]) -> None:
    """Every error says what the user can do about it."""
    message = refused(ConfigError, "Training.segment_length = 20")
    assert "Training.segment_length = 20 must be a multiple of Model.window = 8" in message
    assert "--workdir" in refusal(train, ConfigError)
    message = refused(ConfigError, "Attention.kind = 'improved_clustered'")
    assert "which a causal model must not" in message and "Clustered.layers" in message
    clustered = "Memorizing.layers = ()", "Clustered.layers = (0,)"
    message = refused(ConfigError, *clustered, "Model.positions = 'rotary'")
    assert "use 't5', 'alibi' or 'none'" in message


def test_a_disk_without_room_is_noticed_before_training(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 1000))
    message = refused(CheckpointError)
    assert "checkpoints need" in message and "1.0 kB are free" in message


def test_what_a_resumed_run_must_not_change(
    refused: Callable[..., str], resumed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for binding, difference in {
        "Model.window = 4": "Model.window was 8 and is 4",
        "Optimizer.name = 'adafactor'": "Optimizer.name was 'adamw' and is 'adafactor'",
    }.items():
        message = refused(ConfigError, binding, workdir=resumed)
        assert difference in message and "choose another --workdir" in message
    other = resumed / "other.txt"
    other.write_text("other documents")
    message = refused(DataError, f"Data.train = '{other}'", workdir=resumed)
    assert "the training data are not those that" in message and "other.txt" in message
    assert "differs from the checkpoint's: Data.train" in capsys.readouterr().err
    assert reader.steps(resumed / "checkpoints") == [16, 20, 24], "nothing is lost"


def test_another_tokenizer_than_the_model_knows(refused: Callable[..., str], trained: Path) -> None:
    other = "Data.tokenizer = 'train:300'"
    assert "Model.vocab_size" in refused(ConfigError, other, workdir=trained)
    message = refusal(evaluate, BrtError, f"--workdir={trained}", f"--gin_bindings={other}")
    assert "was trained with another tokenizer than Data.tokenizer = 'train:300'" in message


def test_missing_runs_and_checkpoints_are_refused_by_name(trained: Path, tmp_path: Path) -> None:
    for command in (evaluate, generate):
        flags = ["--prompt=x"] if command is generate else []
        message = refusal(command, ConfigError, f"--workdir={tmp_path}/no", *flags)
        assert message == f"--workdir={tmp_path}/no does not exist"
        message = refusal(command, CheckpointError, f"--workdir={tmp_path}", *flags)
        assert "there are no checkpoints" in message
        message = refusal(command, CheckpointError, f"--workdir={trained}", "--step=7", *flags)
        assert message.endswith("has no checkpoint of step 7; it has [16, 20, 24]")


def test_prompts_that_are_empty_or_not_utf8_are_refused(trained: Path, tmp_path: Path) -> None:
    """Python passes bytes that the locale cannot decode as lone surrogates."""
    assert generate._prompt("caf\udcc3\udca9", None, False) == "café"
    with pytest.raises(DataError, match="^--prompt is not UTF-8 at byte 3 "):
        generate._prompt("caf\udce9", None, False)
    (tmp_path / "p.txt").write_bytes(b"")
    for prompt in ("--prompt=", f"--prompt_file={tmp_path}/p.txt"):
        message = refusal(generate, DataError, f"--workdir={trained}", prompt)
        assert "the prompt is empty" in message
