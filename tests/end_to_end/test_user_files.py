"""Tests layer kinds and tasks in a user's Python file, which `--import` loads."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from brt import command_line, tasks, train, user_files
from brt.config import kinds as sections
from brt.errors import ConfigError
from brt.layers import kinds

LAYERS = Path(__file__).parents[1] / "data/user_files/my_layers.py"
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def registries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undoes the registrations of layer kinds and tasks after each test."""
    monkeypatch.setattr(kinds, "KINDS", dict(kinds.KINDS))
    monkeypatch.setattr(tasks, "TASKS", dict(tasks.TASKS))
    monkeypatch.setattr(sections, "_SECTIONS", dict(sections._SECTIONS))
    monkeypatch.setattr(user_files, "_executed", [])
    yield
    for name in [name for name in sys.modules if name.startswith("brt_user_")]:
        del sys.modules[name]


def refusal(path: Path) -> str:
    """Returns the error with which a command refuses to import the file."""
    with pytest.raises(ConfigError) as caught:
        train.parser().parse_args([f"--import={path}"])
    return str(caught.value)


def test_a_file_places_its_kind_by_its_own_section(tmp_path: Path) -> None:
    bindings = "--gin_bindings=Echo.layers = (1,)", "--gin_bindings=Echo.decay = 0.25"
    args = train.parser().parse_args([f"--import={LAYERS}", *bindings])
    model = command_line.resolve(args).config.model
    assert model.layer_types[:3] == ("window", "echo", "window")
    assert user_files.import_flags() == [f"--import={LAYERS}"]


def test_a_file_that_fails_is_one_sentence(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none.py") == f"--import={tmp_path}/none.py: no such file"
    assert refusal(tmp_path) == f"--import={tmp_path} is a directory; name a file that ends in .py"
    file = tmp_path / "mine.py"
    file.write_text("x = 1\nraise ValueError('not\\nmine')\n")
    assert refusal(file) == f"--import={file} raised ValueError in line 2: not mine"
    file.write_text("import sys\n\nsys.exit('no data')\n")
    assert refusal(file) == f"--import={file} raised SystemExit in line 3: no data"
    file.write_text("x = (\n")
    assert refusal(file).startswith(f"--import={file} raised SyntaxError in line 1: ")
    file.write_text("import nothing_of_this_name\n")
    assert "raised ModuleNotFoundError in line 1: No module named" in refusal(file)
    text = LAYERS.read_text().replace('register_kind("echo"', 'register_kind("window"')
    file.write_text(text)
    assert refusal(file).startswith(f"--import={file}: there is a kind of layers named 'window'")
    text = LAYERS.read_text()
    for section in ("Data", "Window", "Sweep"):
        file.write_text(
            text.replace("Echo)", f"{section})")
            .replace("Echo(", f"{section}(")
            .replace("section=Echo", f"section={section}")
        )
        assert f"'{section}' cannot be the section of the kind 'echo'" in refusal(file)
    file.write_text(text.replace('register_kind("echo"', 'register_kind("other"'))
    assert "the section Echo places layers of the kind 'echo', not of 'other'" in refusal(file)
    file.write_text(
        "import brt\nfrom brt import tasks\nbrt.register_task(tasks.TASKS['speech_recognition'])\n"
    )
    assert refusal(file).startswith(f"--import={file}: there is a task named 'speech_recognition'")


@pytest.mark.slow  # It runs processes; layers/test_kinds.py tests the sections of layer kinds.
def test_a_run_with_a_kind_of_a_user_trains_and_is_read_with_the_same_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("It was a dark and stormy night. " * 200)
    settings = (
        "Echo.layers = (1,)", "Model.layers = 2", "Model.model_dim = 16", "Model.heads = 2",
        "Model.head_dim = 8", "Model.mlp_dim = 16", "Model.window = 16",
        "Training.segment_length = 64", "Training.batch_size = 2", "Training.steps = 2",
        "Optimizer.warmup_steps = 1", "Training.sample_every = 0", "Training.plots = False",
        f"Data.train = '{tmp_path}/a.txt'", f"Data.cache_dir = '{tmp_path}/cache'",
    )  # fmt: skip
    bindings = [f"--gin_bindings={setting}" for setting in settings]

    def run(command: str, *flags: str) -> subprocess.CompletedProcess:
        words = [sys.executable, "-m", f"brt.{command}", f"--workdir={tmp_path}/run", *flags]
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True)

    done = run("train", f"--import={LAYERS}", *bindings)
    assert done.returncode == 0, done.stderr
    done = run("generate", "--prompt=It", "--max_tokens=20")
    assert done.returncode == 2 and "no section 'Echo'" in done.stderr, done.stderr
    assert "needs --import=FILE.py" in done.stderr and "Traceback" not in done.stderr
    done = run("generate", f"--import={LAYERS}", "--prompt=It", "--max_tokens=20")
    assert done.returncode == 0 and done.stdout, done.stderr
