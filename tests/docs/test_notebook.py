"""Tests that all cells of docs/pretrained.ipynb run in order, with a tiny random model."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_decoder import TEXT, write_decoder

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "docs/pretrained.ipynb"


def shell(line: str, names: dict[str, Any]) -> None:
    """Runs a shell line "!..." of a notebook, in which {NAME} stands for the variable `NAME`."""
    command = re.sub(r"\{(\w+)\}", lambda match: str(names[match[1]]), line[1:])
    command = command.replace("python", sys.executable, 1)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, shell=True, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_decoder(tmp_path / "SmolLM2-135M")
    (tmp_path / "books").mkdir()
    for name in ("first", "second"):
        lines = enumerate(TEXT.splitlines())
        book = "".join(f"{i}. {line} So says the {name} book.\n" for i, line in lines)
        (tmp_path / f"books/{name}.txt").write_text(book)
    names: dict[str, Any] = {}
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        if cell["cell_type"] != "code":
            continue
        lines = "".join(cell["source"]).splitlines()
        python = "\n".join(line for line in lines if not line.startswith("!"))
        exec(compile(python, str(NOTEBOOK), "exec"), names)
        for line in lines:
            if line.startswith("!"):
                shell(line, names)
    windows = [row["window"] for row in names["report"]["windows"]]
    assert windows == [128, 256, 512] and names["memory"].tokens > 0
    assert (tmp_path / "exported/config.json").is_file()
