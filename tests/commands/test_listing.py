"""Tests `python -m brt`, the console script `brt`, and the error of `import brt` without jax."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from brt import __main__ as entry

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60
    )


def test_every_command_is_listed_with_its_first_line() -> None:
    commands = {
        file.stem: re.match('"""(.+)\n', text)[1]
        for file in (ROOT / "brt").glob("*.py")
        if "command_line.main(main, parser())" in (text := file.read_text())
    }
    assert set(entry.COMMANDS) == set(commands)
    done = run("-m", "brt")
    assert done.returncode == 0
    for name, about in commands.items():
        assert re.search(f"^  brt {name} +{re.escape(about)}$", done.stdout, re.M)


@pytest.mark.slow  # This test runs commands as processes; quick tests cover what commands call.
def test_a_command_runs_as_its_module_does() -> None:
    flags = ["--gin.Training.steps=7", "--print_config"]
    done = run("-m", "brt", "train", *flags)
    assert done.stdout == run("-m", "brt.train", *flags).stdout
    assert "Training.steps" in done.stdout and done.returncode == 0
    assert run("-m", "brt", "train", "--no").returncode == 2


def test_a_command_that_is_none_is_refused() -> None:
    done = run("-m", "brt", "trian")
    assert done.returncode == 2
    assert done.stderr == "brt: error: there is no command 'trian'; did you mean 'train'?\n"


def test_the_script_is_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    assert '"brt = brt.__main__:main"' in (ROOT / "setup.py").read_text()
    monkeypatch.setattr(sys, "argv", ["brt", "train", "--no"])
    monkeypatch.setenv("GLIBC_TUNABLES", "")  # Otherwise, the process of the tests restarts.
    with pytest.raises(SystemExit) as stop:
        entry.main()
    assert stop.value.code == 2


def test_a_python_without_jax_is_told_so_in_a_sentence() -> None:
    done = run("-c", "import sys; sys.modules['jax'] = None; import brt; brt.load")
    assert done.stderr.splitlines()[-1].startswith("ImportError: brt.load needs jax, which ")
    assert "AttributeError" in run("-c", "import brt; brt.lode").stderr
