"""Tests that .gin files and flags are read, or refused with one sentence that names the place."""

import argparse
import contextlib
import errno
import json
import math
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import brt.tasks  # noqa: F401  # registers the kinds of layers and the tasks
from brt import __version__, command_line, durable, errors, evaluate, generate
from brt.bindings import Resolved
from brt.config import Config, Training
from brt.config.names import field_types, fields_of, section_types
from brt.config_io import configs_directory
from brt.errors import CheckpointError, ConfigError, DataError
from brt.layers.sections import Recurrence
from brt.training.workdir import saved_config


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(**texts: str) -> None:
    """Writes .gin files; write(a="...") writes a.gin."""
    for name, text in texts.items():
        Path(f"{name}.gin").write_text(text, encoding="utf-8")


def resolve(*flags: str, base: Config | None = None) -> Resolved:
    """Returns the config that a command reads from flags, which change the config `base`."""
    parser = command_line.parser("A command.")
    command_line.add_config_flags(parser)
    return command_line.resolve(parser.parse_args(flags), base)


def refusal(*flags: str) -> str:
    """Returns the error that flags cause, which must be one line."""
    with pytest.raises(ConfigError) as caught:
        resolve(*flags)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_bindings_blocks_macros_comments_and_continued_lines() -> None:
    write(
        a="# sizes\nWIDTH = 64  # shared\nModel.model_dim = %WIDTH\nRecurrence.layers = [\n"
        "    0,  # the first\n    -1,\n]\nModel:\n  heads = 2\n  head_dim = 32\n"
        "Data.train = 'books/' '*.txt'\n"
    )
    resolved = resolve("--gin_file=a.gin")
    model = resolved.config.model
    assert (model.model_dim, model.heads, model.head_dim) == (64, 2, 32)
    assert model.of(Recurrence).layers == (0, -1)
    assert resolved.config.data.train == ("books/*.txt",)
    assert resolved.origins["Model.model_dim"] == "a.gin:3"
    assert resolved.origins["Model.head_dim"] == "a.gin:10"
    assert resolved.origins["Model.layers"] == "default"


@pytest.mark.parametrize(
    "flags",
    [
        ["--gin_bindings=Training.steps = 7"],
        ["--gin_bindings", "Training.steps=7\nTraining.seed = 3"],
        ["--gin_param=Training.steps = 7"],
        ["--gin.Training.steps=7"],
        ["--gin_bindings=STEPS = 7", "--gin_bindings=Training.steps = %STEPS"],
    ],
)
def test_the_command_line_beats_files(flags: list[str]) -> None:
    write(a="Training.steps = 5")
    for order in (["--gin_file=a.gin", *flags], [*flags, "--gin_file=a.gin"]):
        resolved = resolve(*order)
        assert resolved.config.training.steps == 7
        assert resolved.origins["Training.steps"] == "--gin_bindings"


def test_a_file_beats_what_it_includes_wherever_the_include_stands() -> None:
    write(
        base="Training.steps = 1\nTraining.seed = 1", middle="include 'base.gin'\nTraining.seed = 2"
    )
    for text in (
        "include 'middle.gin'\nTraining.steps = 3",
        "Training.steps = 3\ninclude 'middle.gin'",
    ):
        write(top=text)
        training = resolve("--gin_file=top.gin").config.training
        assert (training.steps, training.seed) == (3, 2)


def test_an_override_beats_the_base_that_a_neighbour_includes_too() -> None:
    write(
        base="Training.steps = 1",
        small="include 'base.gin'\nTraining.steps = 2",
        wide="include 'base.gin'\nModel.heads = 4",
    )
    for files in (["small", "wide"], ["wide", "small"]):
        resolved = resolve(*(f"--gin_file={name}.gin" for name in files))
        assert resolved.config.training.steps == 2
        assert resolved.origins["Training.steps"] == "small.gin:2"


def test_a_macro_can_be_set_from_above() -> None:
    write(base="W = 64\nModel.window = %W\nModel.heads = %W")
    resolved = resolve("--gin_file=base.gin", "--gin.W=128")
    assert (resolved.config.model.window, resolved.config.model.heads) == (128, 128)
    assert resolved.origins["Model.window"] == "base.gin:2"


def test_includes_are_found_beside_the_file_here_and_in_the_package(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    write(here="Training.seed = 1")
    Path("deep/near.gin").write_text("Checkpoint.keep = 7")
    Path("deep/top.gin").write_text(
        "include 'near.gin'\ninclude 'here.gin'\ninclude 'configs/base/paper.gin'"
    )
    config = resolve("--gin_file=deep/top.gin").config
    assert (config.checkpoint.keep, config.training.seed, config.training.steps) == (7, 1, 500_000)
    assert resolve("--gin_file=base/paper.gin").config.training.steps == 500_000


def test_every_file_that_comes_with_brt_is_understood() -> None:
    for file in configs_directory().rglob("*.gin"):
        if file.parent.name == "sweeps":  # Sweeps are no configs of runs.
            continue
        text = file.read_text()
        # Some files name, in a comment, a setting that a file that includes them must bind.
        asked = re.findall(r"^#.*\((Model\.\w+ = \d+)\)", text, re.M)
        bound = [f"--gin_bindings={one}" for one in asked]
        for task in ("", "summarization", "speech_recognition"):
            chosen = [f"--gin_bindings=Training.task = '{task}'"] if task else []
            with contextlib.suppress(ConfigError):
                resolve(f"--gin_file={file}", *chosen, *bound)
                break
        else:
            pytest.fail(f"no task takes {file}")


def test_a_saved_config_is_what_flags_change() -> None:
    saved = Config(training=Training(steps=7, seed=3))
    resolved = resolve("--gin.Training.steps=9", base=saved)
    assert resolved.config == Config(training=Training(steps=9, seed=3))
    assert resolved.origins["Training.steps"] == "--gin_bindings"
    assert resolved.origins["Training.seed"] == "saved"


def test_print_config_prints_gin_with_origins_and_exits(capsys: pytest.CaptureFixture) -> None:
    write(a="Training.steps = 7")
    with pytest.raises(SystemExit) as stop:
        resolve("--gin_file=a.gin", "--gin.Training.seed=3", "--print_config")
    assert stop.value.code == 0
    text = capsys.readouterr().out
    lines = {line.split(" ")[0]: line for line in text.splitlines() if line}
    assert "# a.gin:1" in lines["Training.steps"]
    assert "# --gin_bindings" in lines["Training.seed"]
    assert "# default" in lines["Model.heads"]
    write(printed=text)
    assert resolve("--gin_file=printed.gin").config == Config(training=Training(steps=7, seed=3))


@pytest.mark.parametrize(
    ("task", "setting", "absent"),
    [
        ("text_classification", "Model.layers = 3", "Window."),
        ("summarization", "Data.train = ('pairs.jsonl',)", "Speech."),
        ("speech_recognition", "Decoding.beams = 3", "Recurrence."),
        ("masked_language_modeling", "Data.tokenizer = 'train:300'", "SelfAttention."),
        ("extractive_qa", "Model.dropout = 0.2", "Seq2Seq."),
    ],
)
def test_print_config_prints_what_the_task_reads(
    task: str, setting: str, absent: str, capsys: pytest.CaptureFixture
) -> None:
    write(a=f"Training.task = '{task}'\n{setting}")
    with pytest.raises(SystemExit):
        resolve("--gin_file=a.gin", "--print_config")
    text = "\n" + capsys.readouterr().out
    assert f"\n{setting.partition(' ')[0]}" in text and f"\n{absent}" not in text
    write(printed=text)
    printed, expected = (resolve(f"--gin_file={name}.gin").config for name in ("printed", "a"))
    assert printed == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\nModle.layers = 2", "a.gin:2: no section 'Modle'; did you mean 'Model.layers'?"),
        ("Model.layer = 2", "a.gin:1: no field 'Model.layer'; did you mean 'Model.layers'?"),
        ("brt.config.Model.layers = 2", "a.gin:1: no section 'brt'; did you mean 'Model.layers'?"),
        ("Model:\n  layer = 2", "a.gin:2: no field 'Model.layer'; did you mean 'Model.layers'?"),
        (
            "learning_rate = 2",
            "a.gin:1: 'learning_rate' is neither Section.field nor a MACRO in upper case; "
            "did you mean 'Optimizer.learning_rate'?",
        ),
        ("Training.steps = '7'", "a.gin:1: Training.steps = '7' must be an int"),
        ("STEPS = 'x'\nTraining.steps = %STEPS", "a.gin:2: Training.steps = 'x' must be an int"),
        (
            "STEPS = 7\nSTEPPS = 8\nTraining.steps = %STEPS",
            "a.gin:2: macro STEPPS is never used; did you mean 'STEPS'?",
        ),
        (
            "STEPS = 7\nTraining.seed = %STEPS\nTraining.steps = %STEPPS",
            "a.gin:3: Training.steps uses %STEPPS, which is not defined; did you mean 'STEPS'?",
        ),
        ("A = %B\nB = %A\nTraining.steps = %A", "macro A is defined by itself"),
        ("Training.steps = (1, %B)", "a.gin:1: Training.steps uses %B, which is not defined"),
        (
            "Training.steps = 7\n\nTraining.steps = 8",
            "a.gin:3: Training.steps is bound twice, to 7 by a.gin:1 and to 8 here; keep one",
        ),
        ("import os", "a.gin:1: 'import os' is refused; gin files are data here"),
        (
            "from __gin__ import dynamic_registration",
            "a.gin:1: 'from __gin__ import dynamic_registration' is refused",
        ),
        ("Training.steps = @os.getpid()", "a.gin:1: @os.getpid() is refused; gin files are data"),
        ("Data.train = ('a', @b)", "a.gin:1: @b is refused; gin files are data here"),
        ("train/Model.layers = 2", "a.gin:1: train/Model.layers has a scope; bind Model.layers"),
        ("STEPS/macro.value = 2", "a.gin:1: STEPS/macro.value has a scope"),
        (
            "\nRecurrence.gate = lstm",
            "a.gin:2: cannot read 'Recurrence.gate = lstm': lstm is no value; text needs quotes "
            "('lstm'), booleans are True, False",
        ),
        (
            "Data.cache_dir = /tmp  # here",
            "a.gin:1: cannot read 'Data.cache_dir = /tmp  # here': /tmp is no value; text needs "
            "quotes ('/tmp')",
        ),
        ("Data.train = (/tmp,)", "a.gin:1: cannot read 'Data.train = (/tmp,)': "),
        ("Model.layers =", "a.gin:1: cannot read"),
        ("Model.layers 2", "a.gin:1: cannot read 'Model.layers 2': Couldn't parse statement"),
        ("Model.layers = 2 3", "a.gin:1: cannot read 'Model.layers = 2 3': 2 3 is no number"),
        ("Model.layers = (2,\n", "a.gin: cannot read it: "),
        ("Model.layers = {[1]: 2}", "a.gin: cannot read it: unhashable"),
        ("include 'b.gin'", "a.gin:1: include 'b.gin': no such file"),
        (
            "include 'base/papre.gin'",
            "include 'base/papre.gin': no such file; did you mean 'configs",
        ),
        ("include 'a.gin'", "a.gin: files include each other in a circle: a.gin includes a.gin"),
        (
            "Training.segment_length = 500\nModel.window = 64",
            "set it to 448 (Training.segment_length set at a.gin:1, Model.window set at a.gin:2)",
        ),
        (
            "\nModel.dropout = 1.5",
            "Model.dropout = 1.5 must be in [0, 1) (Model.dropout set at a.gin:2)",
        ),
    ],
)
def test_a_file_is_refused_with_line_and_remedy(text: str, message: str) -> None:
    write(a=text)
    assert message in refusal("--gin_file=a.gin")


NUMBERS = ["+5", "--5", "10k", "1,000", "1e", "nan", "-inf", "2**10", "9" * 5000, "1.2.3", "007"]
VALUES = ["3.0", "-3.0", "1e12", "1e30", "1e400", "'3'", "'3.5'", "'nan'", "'1e400'", "'x'", "True"]
TEXTS = ["'a' 5", "'a", "books/*.txt", "a b", "2024-books.txt", "5", "0.5", "1e400", "('a', 'b')"]


@pytest.mark.parametrize("name", ["Training.steps", "Optimizer.learning_rate", "Data.tokenizer"])
@pytest.mark.parametrize("value", [*NUMBERS, *VALUES, *TEXTS])
def test_the_value_that_an_error_recommends_is_of_the_right_type(name: str, value: str) -> None:
    flag = f"--gin_bindings={name} = "
    try:
        resolve(flag + value)
        return
    except ConfigError as error:
        message = str(error)
    for remedy in re.findall(r"; write (\S+?)(?: without quotes| in quotes)?$", message):
        with contextlib.suppress(ConfigError):
            resolve(flag + remedy)
            continue
        assert "must be above 0" in refusal(flag + remedy)
    for quoted in re.findall(r"text needs quotes \((.*)\), booleans", message):
        resolve(f"--gin_bindings=Data.tokenizer = {quoted}")
    if value in NUMBERS:
        assert "quote" not in message


@pytest.mark.parametrize("value", ["x" * 5000, "a b " * 1250, "\x1b" * 5000])
@pytest.mark.parametrize("setting", ["Training.task", "Training.steps", "Recurrence.gate"])
def test_errors_do_not_quote_long_values_whole(setting: str, value: str) -> None:
    for text in (f"{setting} = {value!r}", f"{setting} = {value}", f"{value} = 3"):
        message = refusal(f"--gin_bindings={text}")
        assert len(message) < 2100 and message.isprintable()


@pytest.mark.parametrize("first, second", [("a", "b"), ("b", "a")])
def test_files_that_do_not_include_each_other_must_agree(first: str, second: str) -> None:
    write(a="Training.steps = 7", b="\nTraining.steps = 8", c="Training.steps = 7")
    steps, line = {"a": 7, "b": 8}, {"a": 1, "b": 2}
    message = (
        f"{second}.gin:{line[second]}: Training.steps is bound twice, to {steps[first]} by "
        f"{first}.gin:{line[first]} and to {steps[second]} here; neither file includes the other, "
        "so leave one out or decide by --gin_bindings='Training.steps = ...'"
    )
    flags = [f"--gin_file={first}.gin", f"--gin_file={second}.gin"]
    assert message in refusal(*flags)
    assert resolve(*flags, "--gin_bindings=Training.steps = 9").config.training.steps == 9
    write(top=f"include '{first}.gin'\ninclude '{second}.gin'")
    assert message in refusal("--gin_file=top.gin")
    write(top=f"include '{first}.gin'\ninclude '{second}.gin'\nTraining.steps = 9")
    assert resolve("--gin_file=top.gin").config.training.steps == 9
    assert resolve("--gin_file=a.gin", "--gin_file=c.gin").config.training.steps == 7
    assert resolve("--gin_file=a.gin", "--gin_file=./a.gin").config.training.steps == 7


def test_a_longer_circle_names_its_files() -> None:
    write(a="include 'b.gin'", b="include 'c.gin'", c="include 'b.gin'")
    assert "b.gin includes c.gin includes b.gin" in refusal("--gin_file=a.gin")


def test_a_binding_that_another_beats_is_checked_too() -> None:
    write(base="Training.steps = 7.5", top="include 'base.gin'\nTraining.steps = 8")
    assert "base.gin:1: Training.steps = 7.5 must be an int" in refusal("--gin_file=top.gin")


DOUBLING = "".join(f"A{i} = (%A{i + 1}, %A{i + 1})\n" for i in range(40)) + "A40 = 3\n"
CHAIN = "".join(f"A{i} = %A{i + 1}\n" for i in range(3000)) + "A3000 = 3\nTraining.steps = %A0"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Recurrence.layers = " + "[" * 3000 + "]" * 3000, "nested more than 50 deep"),
        ("Model.layers = 3\nModel.heads = \0 4", "there is a NUL"),
        ("Recurrence.layers = " + "{1:" * 3000, "brackets are nested more than 50 deep"),
        (CHAIN, "a.gin:1: macros are nested more than 50 deep"),
        (DOUBLING + "Recurrence.layers = %A0", "A27 is more than 10,000 values"),
        ("Recurrence.layers = (" + "1," * 10_001 + ")", "is more than 10,000 values"),
        ("Data.store = " + "'a' " * 20_000, "more than 100 strings side by side"),
        ("Model.layers = 3 # x\n" * 500_000, "it has 10,500,000 bytes, more than 131,072"),
        ("Training.steps = 1" + "0" * 30, "is more than 64 bits hold"),
        ("Training.steps = 1" + "0" * 5000, "a.gin:1: cannot read 'Training.steps = 1000"),
        ("Training.steps = 3000000000", "Training.steps = 3000000000 must be at most 2147483647"),
        ("Training.segment_length = 16000000000000", "must be at most 2147483647"),
        ("Training.segment_length = 512000000", "lanes of Training.segment_length = 512000000 tok"),
        ("Model.layers = 20000", "Model.layers = 20000 must be at most 1,024"),
        ("include '" + "x" * 400 + ".gin'", "xxx.gin': no such file"),
    ],
    ids=lambda text: text[:30],
)
def test_what_grows_without_bounds_is_refused_at_once(text: str, message: str) -> None:
    write(a=text)
    said = refusal("--gin_file=a.gin")
    assert message in said and len(said) < 1000


def test_files_that_include_files_without_end_are_refused() -> None:
    write(**{f"i{i}": f"include 'i{i + 1}.gin'" for i in range(60)}, i60="Training.steps = 1")
    assert "i51.gin: files include files more than 50 deep" in refusal("--gin_file=i0.gin")
    assert resolve("--gin_file=i20.gin").config.training.steps == 1


def test_a_byte_order_mark_is_no_text() -> None:
    Path("a.gin").write_bytes(b"\xef\xbb\xbfTraining.steps = 7")
    assert resolve("--gin_file=a.gin").config.training.steps == 7


def test_names_that_no_file_system_takes() -> None:
    assert "no such file" in refusal(f"--gin_file={'x' * 300}.gin")
    with pytest.raises(ConfigError, match="cannot be read: File name too long"):
        saved_config("x" * 300)


@pytest.mark.parametrize("name", [name for name, kind in field_types().items() if kind is int])
def test_every_count_has_an_end(name: str) -> None:
    for value in (10**22, -(10**22)):
        assert name in refusal(f"--gin_bindings={name} = {value}")
        for own in fields_of(name):
            section, _, field = own.partition(".")
            with pytest.raises(ConfigError):
                section_types()[section](**{field: value})


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    Path("a.gin").write_bytes(b"Training.steps = 7 # \xff")
    assert "a.gin cannot be read: 'utf-8' codec" in refusal("--gin_file=a.gin")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gin_file=nothing.gin"], "--gin_file=nothing.gin: no such file"),
        (["--gin_file=configs/base/papper.gin"], "did you mean 'configs/base/paper.gin'?"),
        (
            ["--gin_bindings=Recurrence.gate = lstm"],
            "--gin_bindings: cannot read 'Recurrence.gate = lstm'",
        ),
        (["--gin.Model.gaet='lstm'"], "no field 'Model.gaet'; did you mean 'Recurrence.gate'?"),
        (["--gin.Training.steps=1", "--gin.Training.steps=2"], "Training.steps is bound twice"),
        (["--gin.Training.batch_size=0"], "(Training.batch_size set by --gin_bindings)"),
        (["--wrkdir=x"], "unknown flag --wrkdir; did you mean '--workdir'?"),
        (["--gin_fil=x"], "unknown flag --gin_fil; did you mean '--gin_file'?"),
        (["--gin_file"], "expected one argument (--help lists the flags)"),
        (["a.gin"], "unexpected argument 'a.gin'; did you mean --gin_file=a.gin?"),
    ],
)
def test_a_flag_is_refused_with_its_remedy(flags: list[str], message: str) -> None:
    assert message in refusal(*flags)


SCRIPT = """
import sys
from brt import command_line

def command(args):
    match args.do:
        case "letter": print("caf\u00e9")
        case "number": print(open("file", "w").fileno() > 2, file=sys.stderr)
        case "print":
            while True: print("line")

parser = command_line.parser("Test.")
parser.add_argument("--do")
command_line.main(command, parser)
"""


def run(*flags: str, after: str = "", **environment: str) -> subprocess.CompletedProcess:
    """Runs SCRIPT in a shell; `after` is what follows the command, such as a redirection."""
    Path("script.py").write_text(SCRIPT)
    root = Path(command_line.__file__).resolve().parent.parent
    shell = f'set -o pipefail; "$0" script.py "$@" {after}'
    return subprocess.run(
        ["bash", "-c", shell, sys.executable, *flags],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(root), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def obey(arguments: argparse.Namespace) -> None:
    """A command that raises the error that --do names."""
    match arguments.do:
        case "nothing":
            return
        case "interrupt":
            raise KeyboardInterrupt
        case "full":
            raise OSError(errno.ENOSPC, "No space left on device", "/run/x")
        case "bug":
            raise RuntimeError("a bug")
        case "pipe":
            raise BrokenPipeError(errno.EPIPE, "a worker is gone")
        case name:
            raise getattr(errors, name)("because.")


def run_here(monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    parser = command_line.parser("Test.")
    parser.add_argument("--do", default="nothing")
    monkeypatch.setattr(sys, "argv", ["test", *flags])
    command_line.main(obey, parser)


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        ([], 0, ""),
        (["--do=ConfigError"], 2, "brt: error: because.\n"),
        (["--do=DataError"], 3, "brt: error: because.\n"),
        (["--do=CheckpointError"], 4, "brt: error: because.\n"),
        (["--do=NonFiniteError"], 5, "brt: error: because.\n"),
        (["--do=Preempted"], 75, "brt: because.\n"),
        (["--do=interrupt"], 75, "brt: interrupted\n"),
        (["--od=x"], 2, "brt: error: unknown flag --od; did you mean '--do'? (--help lists"),
        (["--do=full"], 4, "brt: error: the disk is full at /run/x; free some space"),
    ],
)
def test_a_command_ends_with_one_sentence_and_its_code(
    flags: list[str],
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as end:
        run_here(monkeypatch, *flags)
    said = capsys.readouterr().err
    assert end.value.code == code
    assert said.startswith(message) and said.count("\n") == (1 if message else 0)


@pytest.mark.parametrize(("name", "error"), [("bug", RuntimeError), ("pipe", BrokenPipeError)])
def test_a_bug_keeps_its_traceback(
    name: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(error):
        run_here(monkeypatch, f"--do={name}")


def test_a_closed_reader_ends_a_command_quietly() -> None:
    done = run("--do=print", after="| head -n 2")
    assert (done.returncode, done.stdout, done.stderr) == (141, "line\nline\n", "")


def test_a_terminal_that_lacks_a_letter_shows_its_code() -> None:
    done = run("--do=letter", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout, done.stderr) == (0, "caf\\xe9\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("closed", [">&-", "<&- >&-"])
def test_closed_streams_are_no_error_and_no_file_takes_their_place(closed: str) -> None:
    done = run("--do=number", after=closed)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "True\n")


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("--json=none/x.json", "No such file or directory"),
        ("--json=.", "Is a directory"),
        ("--save_state=/proc/x.npz", "No such file or directory"),
    ],
)
def test_a_result_that_could_not_be_written_is_refused_before_any_work(
    flag: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{flag} cannot be written: {reason}$"):
        (evaluate if "json" in flag else generate).parser().parse_args([flag])
    assert not list(Path().iterdir())


def test_access_that_is_denied_after_the_check_is_a_failure_of_the_storage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def deny(path: str) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(durable, "named_by_user", deny)
    with pytest.raises(PermissionError):
        command_line.write_json("x.json", {}, None)


def test_a_disk_that_fails_is_exit_code_4_and_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(flags: argparse.Namespace) -> None:
        raise OSError(code, os.strerror(code), "/run/x")

    for code in (errno.EROFS, errno.EIO, errno.ESTALE, errno.EACCES):
        monkeypatch.setattr(sys, "argv", ["brt.x"])
        with pytest.raises(SystemExit) as end:
            command_line.main(fail, argparse.ArgumentParser())
        assert end.value.code == 4
        said = f"brt: error: /run/x cannot be read or written: {os.strerror(code)}; see to the disk"
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(said)


def test_json_into_a_fifo_is_checked_and_written(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    evaluate.parser().parse_args([f"--json={fifo}"])
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.append(fifo.read_text()))
    reader.start()
    command_line.write_json(str(fifo), {"bits": 1.0}, None)
    reader.join()
    assert json.loads(found[0])["bits"] == 1.0 and fifo.is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == ["fifo"]


def test_json_is_written_whole_and_takes_arrays() -> None:
    figures = {"bits": np.float32(0.5), "each": np.arange(2), "none": math.nan}
    command_line.write_json("figures.json", figures, "runs/a")
    found = json.loads(Path("figures.json").read_text())
    assert found == {"run": "a", "version": __version__, "bits": 0.5, "each": [0, 1], "none": None}
    assert [path.name for path in Path().iterdir()] == ["figures.json"]
    with pytest.raises(ConfigError, match="--json=none/x.json cannot be written: No such file"):
        command_line.write_json("none/x.json", {}, None)


def test_an_error_is_one_line_whatever_it_quotes() -> None:
    for error in (ConfigError, DataError, CheckpointError):
        assert str(error("no model (byte piece <\nx85>\u2028 is invalid)")) == (
            "no model (byte piece < x85>  is invalid)"
        )


def test_a_section_of_layers_that_the_model_does_not_have_is_told() -> None:
    write(a="Routing.heads = 1")
    (note,) = resolve("--gin_file=a.gin").notes
    assert note.startswith("a.gin:1: Routing.heads does nothing, because no layer is of this kind")
    assert resolve("--gin_file=configs/base/small.gin").notes == ()
