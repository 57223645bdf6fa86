"""Tests which files commands open when an untrusted person wrote the run directory.

Python's audit hook reports every file, directory, process and connection. Libraries in C++ also
open files, namely the arrays of a checkpoint, but only below paths that the hook has reported.
"""

import dataclasses
import fnmatch
import importlib
import importlib.util
import json
import os
import re
import shutil
import site
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tiny_decoder import write_decoder

import brt
import brt.tasks  # noqa: F401  # This import registers the layer kinds and the tasks.
from brt import command_line, sweep, train, user_cache
from brt.checkpointing import manifest
from brt.config import SECTIONS, Config
from brt.config.fields import settings
from brt.config.names import class_field_types, section_types
from brt.config_io import config_from_json, config_json
from brt.sweeping import directory, points

from .conftest import Commands

ROOT = Path(__file__).resolve().parents[2]
# Audit events that open, change or execute a file, and how many of their arguments are paths.
EVENTS = {
    "open": 1, "os.listdir": 1, "os.scandir": 1, "os.mkdir": 1, "os.rename": 2, "os.remove": 1,
    "os.link": 2, "os.symlink": 2, "os.truncate": 1, "os.rmdir": 1, "os.chmod": 1, "os.chown": 1,
    "os.utime": 1, "shutil.rmtree": 1, "shutil.move": 2, "shutil.copyfile": 2, "os.chdir": 1,
}  # fmt: skip
FORBIDDEN = "subprocess.Popen os.system os.exec os.posix_spawn os.fork socket.connect".split()
INSTALLED = [
    *sysconfig.get_paths().values(), *site.getsitepackages(), sys.prefix, sys.base_prefix,
    os.path.dirname(brt.__file__), "/proc", "/sys", "/dev/null", "/dev/urandom", "/usr", "/lib",
    "/etc",
]  # fmt: skip

TRIALS = [["-P", "-m", name] for name in ("brt.checkpointing.manifest", "brt.data.tokenizer_files")]


class Trace:
    """Records which files this process opens while `on` is set.

    Attributes:
      on: whether events are recorded.
      paths: absolute paths of the files and directories that were opened or changed.
      others: forbidden events, which no command that only reads a run should cause.
    """

    def __init__(self) -> None:
        self.on, self.paths, self.others = False, set[Path](), set[str]()
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple) -> None:
        if not self.on:
            return
        # A child process that tries a file reads only this file and the modules of brt. Since
        # Python 3.13, `subprocess` starts it through `os.posix_spawn`, an event like its own.
        spawned = event in ("subprocess.Popen", "os.posix_spawn")
        if spawned and [*arguments[1]][1:4] in TRIALS:
            return
        if event in FORBIDDEN:
            self.others.add(f"{event} {arguments}")
        for path in arguments[: EVENTS.get(event, 0)]:
            if isinstance(path, str | bytes | os.PathLike):
                self.paths.add(Path(os.path.abspath(os.fsdecode(path))))

    def elsewhere(self, *places: Path) -> set[Path]:
        """Returns the paths outside the given directories and outside installed software."""
        allowed = [Path(place) for place in (*places, *INSTALLED)]
        allowed += [path.resolve() for path in allowed]
        found = self.paths - {*map(Path, sys.path)}  # Imports list the directories in sys.path.
        return {p for p in found if not any(p == a or a in p.parents for a in allowed)}


@pytest.fixture(scope="module")
def trace() -> Trace:
    return Trace()


@pytest.fixture(autouse=True)
def _fresh(trace: Trace) -> Iterator[None]:
    """Forgets what was recorded before, and stops recording after each test."""
    trace.paths.clear()
    trace.others.clear()
    yield
    trace.on = False


def is_text(name: str) -> bool:
    """Returns True if any text is a valid value of the setting."""
    return class_field_types()[name] in (str, tuple[str, ...])


def path_of(name: str) -> str:
    """Returns how a setting uses its path: "read", "written", or "" if it has no path."""
    section, _, field = name.partition(".")
    return settings(section_types()[section])[field].path


def with_text(config: Config, name: str, text: str) -> Config:
    """Returns the config with a text as the value of a setting, or as its only element."""
    section, _, field = name.partition(".")
    value = text if class_field_types()[name] is str else (text,)
    attribute = SECTIONS[section]
    changed = dataclasses.replace(getattr(config, attribute), **{field: value})
    return dataclasses.replace(config, **{attribute: changed})


def trapped(config: Config, trap: Path) -> Config:
    """Returns the config with a path inside `trap` in every setting of a path, and with
    experiment trackers turned on.
    """
    for name in (
        *filter(path_of, class_field_types()),
        "Logging.wandb_project",
        "Logging.mlflow_experiment",
    ):
        config = with_text(config, name, str(trap / name))
    return config


def snapshot(place: Path) -> dict[str, bytes | None]:
    """Returns the content of every file below a directory; None for a directory."""
    return {
        str(path.relative_to(place)): path.read_bytes() if path.is_file() else None
        for path in sorted(place.rglob("*"))
    }


@pytest.fixture(scope="module")
def trap(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Creates a file or directory for every setting of a path and returns their parent."""
    found = tmp_path_factory.mktemp("trap")
    for name in filter(path_of, class_field_types()):
        if path_of(name) == "written":
            (found / name / "programs").mkdir(parents=True)
            (found / name / "xla").mkdir()
        else:
            (found / name).write_text("secret")
    return found


@pytest.fixture(scope="module")
def plain(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the directory of a short run that every command accepts."""
    run = tmp_path_factory.mktemp("plain") / "run"
    small = "Model.layers = 1", "Memorizing.layers = ()", "Recurrence.layers = ()"
    short = ("Training.steps = 2",)
    flags = [f"--gin_file={commands.config}", f"--workdir={run}"]
    flags += [f"--gin_bindings={binding}" for binding in (*small, *short)]
    train.main(train.parser().parse_args(flags))
    return run


@pytest.fixture
def foreign(plain: Path, trap: Path, tmp_path: Path) -> Path:
    """Returns a run whose saved configs name the trap in every setting of a path.

    The checksums of the manipulated checkpoints are valid.
    """
    run = Path(shutil.copytree(plain, tmp_path / "foreign"))
    for file in [run / "config.json", *run.glob("checkpoints/*/meta.json")]:
        content = json.loads(file.read_text())
        saved = content["config"] if file.name == "meta.json" else content
        config = config_json(trapped(config_from_json(saved), trap))
        file.write_text(json.dumps(content | {"config": config} if "config" in content else config))
    for checkpoint in run.glob("checkpoints/*"):
        (checkpoint / manifest.NAME).unlink()
        manifest.write(checkpoint)
    (run / "config.gin").write_text("include '/etc/passwd'\n")
    return run


def test_every_setting_of_a_path_says_so() -> None:
    """Every setting that takes text either declares that it is a path or is listed here."""
    no_paths = """
        Training.task Training.trainable Training.init_keep Adapter.kernels
        Logging.wandb_project Logging.mlflow_experiment
        Data.columns Pairs.columns Pairs.prefix Sentences.columns
        Sentences.header Sentences.labels Kernels.use
        CrossAttention.without
    """.split()
    silent = {name for name in filter(is_text, class_field_types()) if not path_of(name)}
    assert silent <= {*no_paths}, f"{silent - {*no_paths}}: say path='read' or 'written'"


@pytest.mark.slow
def test_the_trap_is_in_every_path_of_a_config(foreign: Path, trap: Path) -> None:
    saved = json.loads((foreign / "config.json").read_text())
    for name in filter(path_of, class_field_types()):
        section, _, field = name.partition(".")
        assert str(trap / name) in str(saved[section][field]), name


COMMANDS: dict[str, Callable[[Path, Path], list[str]]] = {
    "generate": lambda run, out: [f"--workdir={run}", "--prompt=e", "--max_tokens=3",
                                  f"--save_state={out}/s.npz"],
    "inspect": lambda run, out: [f"--workdir={run}", f"--json={out}/i.json"],
    "convert": lambda run, out: ["--from=brt", str(run), "--to=hf", f"{out}/exported"],
    "evaluate": lambda run, out: [f"--workdir={run}", "--gin.Data.store=''",
                                  f"--gin.Data.test='{out}/own'", f"--json={out}/e.json"],
}  # fmt: skip


# A file of an untrusted directory that tools/fuzz.py does not damage under this name, and the fuzz
# target with the same file format.
SAME_READER = {
    "run/tokenizer/*": "tokenizer.json",
    "hf/tokenizer.json": "tokenizer.json",
    "hf/model.safetensors": "m.safetensors",
    "hf/model-*.safetensors": "m.safetensors",
    "run/evaluations/*/*.json": "run/evaluations/5/validation.json",
    "run/evaluations/*/*.jsonl": "run/evaluations/5/validation_documents.jsonl",
    "run/point.json": "sweep/5/point.json",
}


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Returns patterns of the file names for which tools/fuzz.py has targets."""
    spec = importlib.util.spec_from_file_location("fuzz", ROOT / "tools/fuzz.py")
    assert spec and spec.loader
    fuzz = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fuzz)
    targets = fuzz.targets(tmp_path_factory.mktemp("targets"))
    missing = {name for name in SAME_READER.values() if name not in targets}
    assert not missing, f"{missing} are no targets; there are {', '.join(targets)}"
    return [*(target.of for target in targets.values() if target.of), *SAME_READER]


def check_in_table(kind: str, place: Path, trace: Trace, damaged: list[str]) -> None:
    """Checks that every file opened in an untrusted directory is listed in SECURITY.md and
    has a fuzz target.
    """
    rows = re.findall(rf"`({kind}/[^`]+)`", (ROOT / "SECURITY.md").read_text("utf-8"))
    rows += ["run/point.json", "run/output.txt"]  # files of a run that is part of a sweep
    opened = {p.relative_to(place) for p in trace.paths if place in p.parents and p.is_file()}
    names = {
        f"{kind}/{name}" for name in opened if not re.search(r"\.(brt|tmp)|partial", name.name)
    }
    for globs, remedy in (rows, "say in SECURITY.md what it does"), (damaged, "fuzz it"):
        left = {name for name in names if not any(fnmatch.fnmatch(name, glob) for glob in globs)}
        assert not left, f"{left} are opened: {remedy}"


def run_command(name: str, flags: list[str], trace: Trace) -> None:
    """Runs a command in this process and records the files that it opens."""
    command = importlib.import_module(f"brt.{name}")
    arguments = command.parser().parse_args(flags)
    trace.on = True
    try:
        command.main(arguments)
    finally:
        trace.on = False


@pytest.mark.parametrize("name", COMMANDS)
def test_who_reads_a_run_opens_nothing_that_it_names(
    name: str,
    foreign: Path,
    trap: Path,
    tmp_path: Path,
    trace: Trace,
    damaged: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, before = tmp_path / "out", snapshot(trap)
    (out / "own").mkdir(parents=True)
    # Paths relative to an open directory are reported as relative, so make them relative to `out`.
    monkeypatch.chdir(out)
    (out / "own/a.txt").write_text("ether and stone " * 20)
    run_command(name, COMMANDS[name](foreign, out), trace)
    check_in_table("run", foreign, trace, damaged)
    own = (
        foreign,
        out,
        user_cache.directory(),
        Path(os.environ.get("JAX_COMPILATION_CACHE_DIR", out)),
    )
    assert not trace.elsewhere(*own)
    assert not trace.others
    assert snapshot(trap) == before


def test_reports_of_a_strangers_sweep_open_nothing_else(
    foreign: Path,
    trap: Path,
    tmp_path: Path,
    trace: Trace,
    damaged: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "a.gin").write_text("Sweep.grid = {'Training.seed': (1, 2)}\n")
    flags = [f"--gin_file={tmp_path / 'a.gin'}", f"--workdir={tmp_path / 'sweep'}", "--report"]
    arguments = sweep.parser().parse_args(flags)
    bound, resolve = command_line.section_and_variant_resolver(arguments, "Sweep")
    for point in points.expand(points.from_bindings(bound), resolve):
        shutil.copytree(foreign, tmp_path / "sweep" / point.directory)
        place = directory.PointDirectory(tmp_path / "sweep" / point.directory)
        place.write(point, directory.PointProgress(status="finished"))
        place.output.write_text("ended")
    importlib.import_module("matplotlib.font_manager")  # Its first import searches for fonts.
    before = snapshot(trap)
    monkeypatch.chdir(tmp_path / "sweep")
    run_command("sweep", flags, trace)
    for place in (tmp_path / "sweep").iterdir():
        if place.is_dir() and (place / "point.json").exists():
            check_in_table("run", place, trace, damaged)
    assert not trace.elsewhere(tmp_path / "sweep", tmp_path / "a.gin") and not trace.others
    assert snapshot(trap) == before


@pytest.mark.parametrize("model", ["t5", "bart", "roberta"])
@pytest.mark.slow_cases("t5")
def test_converted_directories_are_read_file_by_file(
    model: str, tmp_path: Path, trace: Trace, damaged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, ours = tmp_path / "hf", tmp_path / "brt"
    shutil.copytree(ROOT / "tests/data/huggingface" / model, source)
    config = json.loads((source / "config.json").read_text())
    code = {"AutoConfig": "evil.Config", "AutoModelForSeq2SeqLM": "evil.Model"}
    (source / "config.json").write_text(json.dumps(config | {"auto_map": code}))
    (source / "evil.py").write_text("raise SystemExit('executed')")
    monkeypatch.chdir(tmp_path)
    run_command("convert", ["--from=hf", str(source), "--to=brt", str(ours)], trace)
    check_in_table("hf", source, trace, damaged)
    assert not trace.elsewhere(source, tmp_path) and not trace.others
    trace.paths.clear()
    back = tmp_path / "back"
    run_command("convert", ["--from=brt", str(ours), "--to=hf", str(back)], trace)
    check_in_table("hf", ours, trace, damaged)
    assert not trace.elsewhere(ours, tmp_path) and not trace.others


@pytest.mark.slow
def test_a_strangers_decoder_is_read_file_by_file(
    tmp_path: Path, trace: Trace, damaged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "hf"
    write_decoder(source)
    generation = {"do_sample": True, "temperature": 0.6, "eos_token_id": 2}
    (source / "generation_config.json").write_text(json.dumps(generation))
    (source / "modeling_llama.py").write_text("raise SystemExit('executed')")
    before = snapshot(source)
    monkeypatch.chdir(tmp_path)
    flags = ["--from=hf", str(source), "--to=brt", str(tmp_path / "brt")]
    run_command("convert", flags, trace)
    trace.on = True
    brt.load(source).generate("e", max_tokens=2)
    trace.on = False
    check_in_table("hf", source, trace, damaged)
    assert not trace.elsewhere(source, tmp_path, user_cache.directory()) and not trace.others
    assert snapshot(source) == before


def test_python_reads_a_strangers_run_without_opening_other_files(
    foreign: Path, trap: Path, tmp_path: Path, trace: Trace
) -> None:
    before = snapshot(trap)
    trace.on = True
    model = brt.load(foreign)
    model.bits_per_byte("ether")
    model.generate("e", max_tokens=2)
    trace.on = False
    assert not trace.elsewhere(foreign, user_cache.directory()) and not trace.others
    assert snapshot(trap) == before
