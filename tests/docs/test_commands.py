"""Tests that the commands in README.md and docs/ run as written, in the order of their page.

Small files stand in for the user's own files and models, and training commands run for two
steps. Commands that need downloads or hours only check their settings; see ONLY_RESOLVED.
"""

import ast
import importlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import buckets
import pytest
from tiny_decoder import write_decoder

from brt import command_line, storage
from brt.data.sources import CORPORA

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests/data"
PAGES = {
    str(path.relative_to(ROOT)): path
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if path.name != "python.md"  # test_python.py runs this page and checks its results.
}
SHORT = (
    "Training.steps = 2", "Optimizer.warmup_steps = 1",
    "Training.sample_every = 0", "Training.evaluate_every = 0", "Training.plots = False",
)  # fmt: skip
LAUNCHER = "launch/local/run_processes.py"
# The flag that keeps a command which contains the given word from doing its work; None skips the
# command. The comments say what the work would need.
ONLY_RESOLVED = {
    "configs/data/pg19_tokens.gin": "--print_config",  # 11 GB of data
    "configs/runs/glue/rte.gin": "--print_config",  # the weights of roberta-base
    "runs/rte": None,  # the run of the command above
    "weights/roberta-4k/tokenizer.json": "--print_config",
    "configs/sweeps/gates.gin": "--list",
    "configs/sweeps/medium.gin": "--list",  # hours of training
    "runs/latex/Rec-fixed-skip,seed=0": None,  # a run of the sweep medium.gin
    "configs/sweeps/memory_distance.gin": "--list",  # training of four models
    "configs/sweeps/memory.gin": "--list",  # training of 18 models
    "configs/sweeps/recurrence.gin": "--list",  # training of 42 models
    "configs/sweeps/retrofit.gin": "--list",  # the weights of SmolLM2-135M, and a GPU
    "runs/retrofit/Dense-memory,-4-layers": None,  # two runs of the sweep above
    "brt.lm_eval": None,  # lm_eval, an optional package; tests/interop/test_lm_eval.py
    "gs://my-bucket/runs/books": None,  # a bucket
    "--topology=h100x1": "--print_config",  # packages with a GPU compiler
    "--topology=v4:2x4x4": "--print_config",  # libtpu, an optional package with a TPU compiler
}


def commands(text: str) -> Iterator[str]:
    """Yields the commands in the code blocks of a page. A block of Python is one command; if it
    begins with the name of a file, the command writes this file.

    A block may show bindings without a command. They are checked with `brt.train
    --print_config` and the .gin files of the command before.
    """
    files = ""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S):
        if language == "python":
            if name := re.match(r'"""(\w+\.py):', block):
                block = f"open({name[1]!r}, 'w').write({block!r})"
            yield shlex.join(["python", "-c", block])
            continue
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("--gin_bindings"):
                line = f"python -m brt.train {files} {line} --print_config"
            files = " ".join(re.findall(r"--gin_file=\S+", line)) or files
            if re.match(r"(python -m brt|python launch/|cp) ?", line):
                yield line


def runs() -> list[tuple[str, list[str]]]:
    """Returns the name and commands of every page that has commands, without synopses."""
    found = [(name, list(commands(path.read_text()))) for name, path in PAGES.items()]
    return [(name, [c for c in lines if not synopsis(c)]) for name, lines in found if lines]


def synopsis(command: str) -> bool:
    """Returns True if a command only shows the form of its arguments, such as `--workdir=DIR`."""
    return bool(re.search(r"--workdir=DIR|--output DIR|\|brt|=FILE", command))


def adapted(command: str) -> list[str] | None:
    """Returns the arguments with which a command is tested; None if the command is skipped."""
    words = shlex.split(command, comments=True)
    if words[0] != "python":
        return ["bash", "-c", command]
    for word, flag in ONLY_RESOLVED.items():
        if any(w == word or w.endswith(f"={word}") or f"'{word}'" in w for w in words):
            return [sys.executable, *words[1:], flag] if flag else None
    # A page's own number of steps is replaced by 20 if it has three digits or more.
    words = [re.sub(r"^(--gin\.Training\.steps=)\d{3,}$", r"\g<1>20", word) for word in words]
    short = [binding for binding in SHORT if binding.split()[0] not in command]
    bindings = [f"--gin_bindings={binding}" for binding in short if "brt.train" in words]
    known = {"python": sys.executable, LAUNCHER: str(ROOT / LAUNCHER)}
    return [*(known.get(word, word) for word in words), *bindings]


@pytest.fixture(scope="module")
def granted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a directory with the files and the trained model that the pages assume to exist."""
    path = tmp_path_factory.mktemp("home")
    (path / "books").mkdir()
    for number, book in enumerate(sorted(CORPORA.rglob("*.txt"))[:3]):
        (path / f"books/{number}.txt").write_bytes(book.read_bytes()[:20000])
    shutil.copy(path / "books/1.txt", path / "document.txt")
    pairs = next(CORPORA.glob("summaries/train/*.jsonl")).read_text().splitlines(keepends=True)
    (path / "pairs.jsonl").write_text("".join(pairs[:40]))
    for number, split in enumerate(("train", "validation", "test")):
        (path / "papers" / split).mkdir(parents=True)
        shutil.copy(path / f"books/{number}.txt", path / f"papers/{split}/paper.tex")
        (path / "latex" / split).mkdir(parents=True)
        text = sorted(CORPORA.rglob("*.txt"))[number].read_bytes()
        (path / f"latex/{split}/chapter.tex").write_bytes(text[20_000:80_000])
    shutil.copytree(FIXTURES / "huggingface/roberta", path / "roberta-base")
    shutil.copytree(FIXTURES / "huggingface/t5", path / "DIRECTORY")
    (path / "HuggingFaceTB").mkdir()
    write_decoder(path / "HuggingFaceTB/SmolLM2-135M")
    trained = "python -m brt.train --gin_file=configs/runs/quickstart.gin --workdir=runs/novels"
    subprocess.run(adapted(trained), cwd=path, check=True)
    shutil.copytree(path / "runs/novels", path / "runs/quickstart")  # `make quickstart` trains it.
    return path


@pytest.mark.slow
@pytest.mark.parametrize(("page", "lines"), runs(), ids=[page for page, _ in runs()])
def test_the_commands_of_a_page_run(
    page: str, lines: list[str], granted: Path, tmp_path: Path
) -> None:
    home = shutil.copytree(granted, tmp_path / "home")
    for command in lines:
        words = adapted(command)
        if words is not None:
            done = subprocess.run(words, cwd=home, capture_output=True, text=True, timeout=900)
            assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"


def test_the_synopsis_names_flags_that_exist() -> None:
    lines = [line for line in commands(PAGES["README.md"].read_text()) if synopsis(line)]
    assert lines
    for line in lines:
        name = line.split()[2]
        shown = importlib.import_module(name).parser().format_help()
        missing = [flag for flag in re.findall(r"--\w+", line) if flag not in shown]
        assert not missing, f"{name} has no {missing}"


def test_what_a_page_imports_is_there() -> None:
    for name, path in PAGES.items():
        for module, names in re.findall(r"^from (brt[.\w]*) import (.+)$", path.read_text(), re.M):
            found = importlib.import_module(module)
            missing = [own for own in re.split(r"\W+", names) if not hasattr(found, own)]
            assert not missing, f"{name}: {module} has no {missing}"


def examples() -> list[tuple[str, str]]:
    """Returns the commands in docstrings of brt, comments of configs and Markdown of launch, each
    with the name of its file.
    """
    sources = {}
    for path in sorted((ROOT / "brt").rglob("*.py")):
        if "python -m brt." in (text := path.read_text(encoding="utf-8")):
            sources[path] = ast.get_docstring(ast.parse(text)) or ""
    for path in (*(ROOT / "configs").rglob("*.gin"), *(ROOT / "launch").rglob("*.md")):
        sources[path] = re.sub(r"^# ?", "", path.read_text(encoding="utf-8"), flags=re.M)
    found = []
    for path, text in sources.items():
        for command in re.findall(r"^ *(python -m brt\.\w+ .*)$", text.replace("\\\n", " "), re.M):
            if not re.search(r"=(FILE|DIR)\b|\.\.\.| is python|[{$\[]", command):
                found.append((str(path.relative_to(ROOT)), command))
    return found


@pytest.mark.parametrize(("source", "command"), examples())
def test_an_example_of_the_source_is_understood(
    source: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command's flags exist, and its .gin files and bindings are accepted."""
    monkeypatch.chdir(ROOT)
    _, _, name, *words = shlex.split(command.partition(" > ")[0], comments=True)
    with buckets.BucketServer("my-bucket") as server:
        for variable, value in buckets.environment(server).items():
            monkeypatch.setenv(variable, value)
        args = importlib.import_module(name).parser().parse_args(words)
    storage.discard_all()
    if getattr(args, "gin_file", ()) and name != "brt.sweep":
        command_line.read(args.gin_file, args.gin_bindings)


def test_make_quickstart_is_three_of_our_commands() -> None:
    made = subprocess.run(
        ["make", "--dry-run", "quickstart"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert re.findall(r"-m (brt\.\w+)", made) == ["brt.train", "brt.evaluate", "brt.generate"]
