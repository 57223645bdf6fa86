"""Tests that names which other people chose reach terminals, logs and reports only as escapes.

Every command gets documents, checkpoints, settings and points with such names. The command's output
and every text file that it writes may not contain characters that control a terminal or reorder
text.
"""

import csv
import importlib
import io
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from brt import command_line, output, sweep
from brt.errors import BrtError
from brt.sweeping import directory, points
from brt.training.progress import Progress

from .conftest import Commands

UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
CONTROLS = "\x1b]0;x\x07\x1b[2J\x9b31m\u202egnp\u2066\u061c\r\x85\u2028\x7f"
NAME = f"=1+1 <img src=x onerror=a> |{CONTROLS}"
ENDINGS = (".txt", ".json", ".jsonl", ".md", ".csv", ".html", ".gin")


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a directory of documents whose names and texts are crafted."""
    place = tmp_path_factory.mktemp("books") / f"b{CONTROLS}"
    for split in ("train", "validation", "test"):
        (place / split).mkdir(parents=True)
        for i in range(2):
            text = f"{split} {i} {NAME} " * 12
            (place / split / f"{i}{NAME}.txt").write_text(text, encoding="utf-8", newline="")
    return place


@pytest.fixture(scope="module")
def run(commands: Commands, books: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the directory of a run on the crafted documents; tests may only add files."""
    place = tmp_path_factory.mktemp("runs") / f"run{CONTROLS}"
    values = {
        "Model.layers": 1, "Memorizing.layers": (), "Recurrence.layers": (), "Training.steps": 2,
        "Training.evaluate_every": 2,
        "Training.sample_every": 2,
        **{f"Data.{split}": str(books / split) for split in ("train", "validation", "test")},
    }  # fmt: skip
    flags = [f"--gin_bindings={name} = {value!r}" for name, value in values.items()]
    said = call("train", f"--gin_file={commands.config}", f"--workdir={place}", *flags)
    assert not UNSAFE.search(said)
    return place


def call(name: str, *flags: str) -> str:
    """Returns what a command prints in this process; an error is shown as the command shows it."""
    command = importlib.import_module(f"brt.{name}")
    streams, said = (sys.stdout, sys.stderr), io.StringIO()
    sys.stdout = sys.stderr = said
    try:
        command.main(command.parser().parse_args(flags))
    except BrtError as error:
        output.say(f"error: {error}")
    except SystemExit as end:  # --print_config
        assert end.code == 0
    finally:
        sys.stdout, sys.stderr = streams
    return said.getvalue()


def check_files(place: Path, *without: str) -> None:
    """Checks every text file below a directory, but for directories with names in `without`."""
    files = [path for path in place.rglob("*") if path.is_file() and path.suffix in ENDINGS]
    for path in files:
        # A marker of Orbax, which has control characters, and machines' files are no text.
        if not {*path.relative_to(place).parts} & {*without, "state", "tokenizer"}:
            assert not UNSAFE.search(path.read_bytes().decode()), path
    assert files


def test_training_escapes_names(run: Path) -> None:
    assert "0=1+1" in (run / "log.txt").read_text() and list(run.glob("samples/*"))
    check_files(run)


COMMANDS = {
    "evaluate": ["evaluate", "--workdir={run}", "--json={out}/e.json"],
    "compare": ["evaluate", "--workdir={run}", "--compare={run}"],
    "follow": ["evaluate", "--workdir={run}", "--follow", "--json={out}/e.json"],
    "inspect": ["inspect", "--workdir={run}", "--json={out}/i.json"],
    "probe": ["inspect", "--workdir={run}", "--probe", "--tokens=64"],
    "data": ["inspect", "--workdir={run}", "--data"],
    "export": ["convert", "--from=brt", "{run}", "--to=hf", "{out}/{name}"],
    "missing": ["convert", "--from=hf", "{books}", "--to=brt", "{out}/{name}"],
    "prepare": ["prepare", "--documents", "{books}/train", "--output", "{out}/{name}"],
    "ending": ["prepare", "--documents", "{out}/a.{name}", "--output", "{out}/{name}"],
    "pairs": ["prepare", "--pairs", "files", "--name=own", "--train", "{out}/pairs.jsonl",
              "--output", "{out}/{name}", "--errors=skip"],
    "columns": ["prepare", "--pairs", "files", "--name=own", "--train", "{out}/pairs.jsonl",
                "--output", "{out}/{name}", "--source_field={name}"],
    "resume": ["train", "--workdir={run}"],
    "config": ["train", "--workdir={run}", "--print_config",
               "--gin_bindings=Logging.wandb_project = {name!r}"],
    "unknown": ["train", "--workdir={run}", "--gin_bindings={name}.x = 3"],
    "value": ["train", "--workdir={run}", "--gin_bindings=Training.task = {name!r}"],
    "plan": ["plan", "--workdir={run}", "--print_config",
             "--gin_bindings=Data.train = {name!r}"],
    "no plan": ["plan", "--workdir={out}/{name}"],
    "state": ["generate", "--workdir={run}", "--prompt=a", "--load_state={out}/{name}"],
    "list": ["sweep", "--gin_file={out}/s.gin", "--workdir={out}/sweep", "--list"],
    "report": ["sweep", "--gin_file={out}/s.gin", "--workdir={out}/sweep", "--report"],
}  # fmt: skip


@pytest.mark.slow_cases("compare", "follow", "export", "pairs", "probe", "no plan")
@pytest.mark.parametrize("case", COMMANDS)
def test_commands_escape_names(
    case: str, run: Path, books: Path, tmp_path: Path, commands: Commands
) -> None:
    (tmp_path / f"a.{NAME}").write_text("text")
    (tmp_path / "pairs.jsonl").write_text(
        "".join(json.dumps({"id": NAME, "text": NAME * 9, "summary": NAME}) + "\n" for _ in "ab")
        + json.dumps({"id": NAME, "text": "", "summary": ""})
    )
    # `test_reports_of_sweeps_hold_no_markup_and_no_formulas` looks at the files of the report.
    (tmp_path / "s.gin").write_text(
        f"include {str(commands.config)!r}\n"
        f"Sweep.grid = {{'Data.train': ({str(tmp_path / NAME)!r}, {str(books)!r})}}\n"
    )
    (tmp_path / "sweep").mkdir()
    name, *flags = [
        text.format(run=run, books=books, out=tmp_path, name=NAME) for text in COMMANDS[case]
    ]
    said = call(name, *flags)
    assert said and not UNSAFE.search(said)
    check_files(run)
    check_files(tmp_path, "pairs.jsonl", "partial")
    if case == "compare":
        (page,) = (run / "plots").glob("*.html")
        assert "&lt;img" in page.read_text() and "<img" not in page.read_text()


@pytest.mark.parametrize("damage", ["extra", "missing"])
def test_names_in_a_checkpoint_are_escaped_in_warnings(
    damage: str, run: Path, tmp_path: Path
) -> None:
    copied = shutil.copytree(run, tmp_path / "run")
    newest = shutil.copytree(copied / "checkpoints/2", copied / "checkpoints/3")
    if damage == "extra":
        (newest / NAME).touch()
    else:
        with (newest / "MANIFEST.sha256").open("a", newline="") as file:
            file.write(f"{'0' * 64}  {NAME}\n")
    for command in ["inspect"], ["generate", "--prompt=a", "--max_tokens=1"]:
        said = call(command[0], f"--workdir={copied}", *command[1:])
        assert "damaged" in said and not UNSAFE.search(said)


@pytest.mark.slow
def test_text_of_a_model_is_escaped_on_terminals_only(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = f"--workdir={run}", f"--prompt=a{CONTROLS}", "--max_tokens=1"
    assert CONTROLS in call("generate", *flags)
    master, slave = os.openpty()
    with open(slave, "w", encoding="utf-8") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        command = importlib.import_module("brt.generate")
        command.main(command.parser().parse_args(flags))
    shown = os.read(master, 4096).decode()
    os.close(master)
    assert shown.startswith(r"a\x1b]0;x\x07") and not UNSAFE.search(shown.replace("\r\n", "\n"))


@pytest.mark.parametrize("bar", [False, True])
def test_messages_of_a_run_are_escaped_on_terminals_and_in_the_log(
    bar: bool, tmp_path: Path
) -> None:
    terminal = io.StringIO()
    with Progress(9, log=tmp_path / "log.txt", stream=terminal, bar=bar) as progress:
        before = len(terminal.getvalue())
        progress.message(f"read {NAME}\nbrt: forged")
        progress.note(NAME)
    said = terminal.getvalue()[before:]
    assert "\x1b" not in said and "\x9b" not in said and "\u202e" not in said
    log = (tmp_path / "log.txt").read_text()
    assert not UNSAFE.search(log) and "\nbrt" not in log + said


REASONS = [NAME, "=HYPERLINK(1)", "+1", "-1", "@a", "\t=1", " =1", "a | b\n\n# c", "[a](b)", "<b>"]


@pytest.mark.parametrize("reason", REASONS)
def test_reports_of_sweeps_hold_no_markup_and_no_formulas(
    reason: str, commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s.gin").write_text(
        f"include {str(commands.config)!r}\nSweep.points = ({{'name': 'a<b>|[c](d)', "
        f"'Logging.wandb_project': {reason!r}, 'Training.seed': -3}}, {{'name': '=$x'}})\n"
    )
    flags = ["--gin_file=s.gin", "--workdir=sweep", "--report"]
    bound, resolve = command_line.section_and_variant_resolver(
        sweep.parser().parse_args(flags), "Sweep"
    )
    Path("sweep").mkdir()
    for point in points.expand(points.from_bindings(bound), resolve):
        progress = directory.PointProgress(status="failed", reason=reason)
        directory.PointDirectory(Path("sweep", point.directory)).write(point, progress)
    said = call("sweep", *flags)
    with Path("sweep/report.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert len(rows) == 3 and any("-3" in row for row in rows), "numbers stay as they are"
    for cell in sum(rows, []):
        assert cell == "-3" or not re.match(r"\s*[=+@-]", cell)
    text = Path("sweep/report.md").read_text()
    for markdown in (text, said):
        plain = re.sub(r"\\[^a-z0-9]", "", markdown)
        assert not re.search(r"[<`\[]", plain)
        tables = re.findall(r"(?:^\|.*\n)+", plain, re.M)
        assert all(len({line.count("|") for line in table.splitlines()}) == 1 for table in tables)
    assert tables and len(re.findall("^- ", text, re.M)) == 2
    assert text.count("\n#") == 2
    check_files(tmp_path)
