"""Damaged files are read or refused in one line: some here, many by `tools/fuzz.py`."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from brt.errors import DataError

TOOL = Path(__file__).resolve().parents[1] / "tools/fuzz.py"


@pytest.fixture(scope="module")
def fuzz() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz", TOOL)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("inputs", [300, pytest.param(30_000, marks=pytest.mark.slow)])
def test_every_reader_reads_or_refuses(
    inputs: int, fuzz: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    code = fuzz.run(inputs, 0, tmp_path / "kept")
    said = capsys.readouterr()
    assert code == 0, said.err
    assert len(said.out.splitlines()) > 20 and not (tmp_path / "kept").exists()


def _fails(path: Path) -> None:
    if b"\xff" in path.read_bytes():
        raise KeyError("bug")
    if len(path.read_bytes()) < 9:
        raise DataError("")


def test_what_is_neither_is_kept(
    fuzz: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "a").write_bytes(b"an example")
    target = {"a": fuzz.Target(tmp_path / "a", _fails)}
    monkeypatch.setattr(fuzz, "targets", lambda place: target)
    assert fuzz.run(200, 0, tmp_path / "kept") == 1
    said = capsys.readouterr().err
    assert "a: KeyError at " in said and "a: DataError without a sentence" in said
    assert all(str(path) in said for path in (tmp_path / "kept").iterdir())
    assert (tmp_path / "a").read_bytes() == b"an example"
