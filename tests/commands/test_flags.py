"""Tests how commands read flags: settings, shortened runs, and errors that name the right flag."""

import os
import sys
from pathlib import Path

import pytest

from brt import command_line, prepare
from brt.bindings import Resolved
from brt.config import Config, Optimizer, Training
from brt.errors import ConfigError, DataError

FILE = "Training.steps = 100\nOptimizer.warmup_steps = 30\nOptimizer.schedule = '{}'\n"


def resolve(*flags: str, base: Config | None = None) -> Resolved:
    """Resolves the flags of a command; `base` is the saved config of a run."""
    parser = command_line.parser("A command.")
    command_line.add_config_flags(parser)
    return command_line.resolve(parser.parse_args(flags), base)


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "a.gin").write_text(FILE.format("cosine"))
    return f"--gin_file={tmp_path}/a.gin"


@pytest.mark.parametrize(
    ("flag", "binding"),
    [
        ("--steps=10", "'Training.steps = 10'"),
        ("--learning_rate=0.1", "'Optimizer.learning_rate = 0.1'"),
        ("--layers", "'Model.layers = ...'"),
        ("--schedule=linear", "\"Optimizer.schedule = 'linear'\""),
        ("--columns=text=body", "\"Data.columns = 'text=body'\""),
    ],
)
def test_a_setting_that_is_taken_for_a_flag_is_taught(flag: str, binding: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(flag)
    name = binding[1:].partition(" ")[0]
    assert str(caught.value).startswith(
        f"{name} is no flag of its own; bind it: --gin_bindings={binding} "
    )
    if "..." not in binding:
        resolve(f"--gin_bindings={binding[1:-1]}", "--gin.Optimizer.warmup_steps=1")


def test_commands_without_bindings_teach_none() -> None:
    with pytest.raises(ConfigError, match="unknown flag --steps"):
        command_line.parser("A command.").parse_args(["--steps=10"])


def test_a_short_trial_shortens_its_warm_up_and_says_so(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = resolve(file, "--gin.Training.steps=25")
    assert (found.config.training.steps, found.config.optimizer.warmup_steps) == (25, 2)
    assert found.origins["Optimizer.warmup_steps"] == "a tenth of Training.steps"
    said = capsys.readouterr().err
    assert said.startswith("brt: Optimizer.warmup_steps = 2, a tenth of Training.steps = 25, for ")
    assert said.count("\n") == 1 and "a.gin:2" in said
    assert resolve(file, "--gin.Training.steps=31").config.optimizer.warmup_steps == 30
    assert capsys.readouterr().err == ""


def test_a_saved_config_with_fewer_steps_gets_a_shorter_warm_up(
    capsys: pytest.CaptureFixture[str],
) -> None:
    saved = Config(
        training=Training(steps=100), optimizer=Optimizer(warmup_steps=30, schedule="linear")
    )
    assert resolve("--gin.Training.steps=9", base=saved).config.optimizer.warmup_steps == 0


def test_what_is_asked_for_is_refused_and_other_schedules_stay(file: str, tmp_path: Path) -> None:
    for flags in (
        # This warm-up was set on the command line, so it is not shortened.
        ["--gin.Training.steps=25", "--gin.Optimizer.warmup_steps=40"],
        ["--gin.Optimizer.warmup_steps=100"],
    ):
        with pytest.raises(ConfigError, match="must be below Training.steps"):
            resolve(file, *flags)
    (tmp_path / "b.gin").write_text("include 'a.gin'\nTraining.steps = 25\n")
    with pytest.raises(ConfigError, match="must be below Training.steps = 25"):
        resolve(f"--gin_file={tmp_path}/b.gin")
    rsqrt = resolve(file, "--gin.Training.steps=25", "--gin.Optimizer.schedule='rsqrt'")
    assert rsqrt.config.optimizer.warmup_steps == 30, "it does not depend on the steps"


FLAGS = {"Data.text_field": "--text_field", "Data.errors": "--errors", "beams=": "--beams="}


@pytest.mark.parametrize(
    ("flags", "message", "shown"),
    [
        (FLAGS, "set Data.text_field to 'body'", "set --text_field to 'body'"),
        (FLAGS, "with Data.errors = 'replace'", "with --errors=replace"),
        (FLAGS, "Data.errors = 3 is none", "--errors=3 is none"),
        (FLAGS, "beams=4 searches", "--beams=4 searches"),
        (FLAGS, "--beams=4 or Decoding.beams = 4", "--beams=4 or Decoding.beams = 4"),
        (FLAGS, "Data.text_fields", "Data.text_fields"),
        (
            prepare.DOCUMENT_FLAGS, "name one of ['a'] with Data.columns = ('text=FIELD',), or",
            "name one of ['a'] with --columns text=FIELD, or",
        ),
        (
            prepare.PAIR_FLAGS, "has no column 'c' as Data.columns says for 'target'; its",
            "has no column 'c' as --target_field says; its",
        ),
        (
            prepare.PAIR_FLAGS, "with Data.columns = ('source=COLUMN', 'target=COLUMN')",
            "with --source_field and --target_field",
        ),
    ],
)  # fmt: skip
def test_errors_are_said_in_the_flags_of_a_command(flags: dict, message: str, shown: str) -> None:
    with pytest.raises(DataError) as caught, command_line.errors_naming(flags):
        raise DataError(message)
    assert str(caught.value) == shown


def test_xla_keeps_its_banners_unless_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["a command"])
    for said, wanted in ((None, "3"), ("0", "0")):
        monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
        if said:
            monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", said)
        seen = []
        with pytest.raises(SystemExit):
            command_line.main(
                lambda args, seen=seen: seen.append(os.environ["TF_CPP_MIN_LOG_LEVEL"]),
                command_line.parser("A command."),
            )
        assert seen == [wanted]
