"""Tests with some inputs of tools/fuzz.py that damaged files are read or refused in one line."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from brt.errors import BrtError, DataError

TOOL = Path(__file__).resolve().parents[1] / "tools/fuzz.py"


@pytest.fixture(scope="module")
def fuzz() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz", TOOL)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Tasks of Orbax may fail in the background after their checkpoint was refused.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
def test_every_reader_reads_or_refuses(
    fuzz: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    code = fuzz.run(30_000, 0, tmp_path / "kept")
    said = capsys.readouterr()
    assert code == 0, said.err
    assert len(said.out.splitlines()) > 20 and not (tmp_path / "kept").exists()


def _fails(path: Path) -> None:
    if b"\xff" in path.read_bytes():
        raise KeyError("bug")
    if len(path.read_bytes()) < 9:
        raise DataError("")


def test_inputs_that_are_neither_read_nor_refused_are_saved(
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


def test_crafted_run_directories_are_read_or_refused(
    fuzz: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    code = fuzz.run_crafted(12, 0, tmp_path / "kept")
    said = capsys.readouterr()
    assert code == 0, said.err
    assert "12 directories: " in said.out and "'refused'" in said.out


@pytest.fixture(scope="module")
def readers(fuzz: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return fuzz.runs.readers(tmp_path_factory.mktemp("run"))


@pytest.mark.slow_cases("content0", "1e999")
@pytest.mark.parametrize("content", [b"[" * 10**5, b"[]", b"null", b'"\xff', b"1e999"])
def test_every_json_of_a_run_has_a_shape(readers: dict[str, Any], content: bytes) -> None:
    """metrics.jsonl is not tested here, because the readers skip and report its damaged lines."""
    for name, reader in readers.items():
        if name.endswith((".json", "bad_batches.jsonl")):
            good = reader.path.read_bytes()
            reader.path.write_bytes(content)
            with pytest.raises(BrtError, match=r"^[^\n]+$"):
                reader.read(reader.path)
            reader.path.write_bytes(good)
