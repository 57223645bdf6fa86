"""Tests that an interrupted preparation continues, and that its result is the same as without the
interruption.
"""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from brt import config
from brt.data import manifests, preparation, token_store
from brt.data.token_store import Row, Writer

KILLED = """
import os, signal, sys
from brt import command_line, prepare
from brt.data import token_store
token_store.COMMIT = 1
end = token_store.Writer.end_document
def killed(self, name, *rest):
    end(self, name, *rest)
    if self.documents == 3:
        os.kill(os.getpid(), signal.SIGKILL)
token_store.Writer.end_document = killed
command_line.main(prepare.main, prepare.parser())
"""


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> config.Data:
    """Returns a section with five documents for training and two for validation; every document is
    committed.
    """
    monkeypatch.setattr(token_store, "COMMIT", 1)
    for split, count in ("train", 5), ("validation", 2):
        rows = [{"text": f"{split} {i}\n" + "One or two words. " * 20 * i} for i in range(count)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return config.Data(
        train=(str(tmp_path / "train.jsonl"),), validation=(str(tmp_path / "validation.jsonl"),),
        tokenizer="train:300", test_fraction=0.0,
    )  # fmt: skip


def interrupted_after(
    documents: int, data: config.Data, output: Path, error: type[BaseException]
) -> None:
    """Prepares `data` until a number of documents were written in all, and then raises `error`."""
    end, written = Writer.end_document, [0]

    def end_document(self: Writer, name: str, row: Row, digest: bytes, unknown: int) -> None:
        end(self, name, row, digest, unknown)
        written[0] += 1
        if written[0] == documents:
            raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Writer, "end_document", end_document)
        with pytest.raises(error):
            preparation.prepare(data, output, progress=False)


def content(directory: Path) -> dict[str, bytes]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


@pytest.mark.slow_cases("3", "6")
@pytest.mark.parametrize("documents", [1, 3, 5, 6])
def test_an_interrupted_preparation_continues(
    data: config.Data, tmp_path: Path, documents: int, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    preparation.prepare(data, tmp_path / "whole", progress=False)
    interrupted_after(documents, data, tmp_path / "again", KeyboardInterrupt)
    encoded: list[str] = []
    write = Writer.end_document

    def end_document(self: Writer, name: str, *rest: object) -> None:
        encoded.append(name)
        write(self, name, *rest)

    monkeypatch.setattr(Writer, "end_document", end_document)
    preparation.prepare(data, tmp_path / "again")
    assert content(tmp_path / "again") == content(tmp_path / "whole")
    assert len(encoded) == 7 - documents
    assert "training a tokenizer" not in capsys.readouterr().err
    assert not [*tmp_path.glob(".*")]


@pytest.mark.slow
def test_a_killed_preparation_continues(tmp_path: Path, data: config.Data) -> None:
    command = [
        sys.executable, "-c", KILLED, "--documents", *data.train, "--validation", *data.validation,
        "--tokenizer", "bytes", "--test_fraction", "0", "--output", str(tmp_path / "out"),
    ]  # fmt: skip
    assert subprocess.run(command, capture_output=True, check=False).returncode == -9
    command[1:3] = ["-m", "brt.prepare"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert "continuing with train: 3 documents" in found.stderr
    command[-1] = str(tmp_path / "whole")
    subprocess.run(command, check=True, capture_output=True)
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def leave_partial(data: config.Data, output: Path) -> Path:
    interrupted_after(3, data, output, KeyboardInterrupt)
    (place,) = output.parent.glob(f".{output.name}.*")
    return place


def cut_tokens(place: Path) -> None:
    os.truncate(next(place.glob("*/partial/train/tokens.bin")), 1)


def cut_progress(place: Path) -> None:
    next(place.glob("*/partial/train/progress.json")).write_text('{"documents": 3')


def link_tokens(place: Path) -> None:
    tokens = next(place.glob("*/partial/train/tokens.bin"))
    tokens.unlink()
    tokens.symlink_to(place.parent / "precious")


def age(place: Path) -> None:
    os.utime(place / ".held", (0, 0))


@pytest.mark.parametrize("damage", [cut_tokens, cut_progress, link_tokens, age])
def test_a_damaged_or_old_partial_preparation_is_not_used(
    data: config.Data, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    (tmp_path / "precious").write_text("keep")
    preparation.prepare(data, tmp_path / "whole", progress=False)
    place = leave_partial(data, tmp_path / "again")
    damage(place)
    if damage is age:
        manifests.remove_abandoned(tmp_path / "other")
        assert not place.exists()
    preparation.prepare(data, tmp_path / "again", progress=False)
    assert content(tmp_path / "again") == content(tmp_path / "whole")
    assert (tmp_path / "precious").read_text() == "keep" and not [*tmp_path.glob(".*")]


def test_other_data_do_not_continue(data: config.Data, tmp_path: Path) -> None:
    data = dataclasses.replace(data, tokenizer="bytes")
    place = leave_partial(data, tmp_path / "again")
    Path(data.train[0]).write_text(json.dumps({"text": "another text"}))
    dataset = preparation.prepare(data, tmp_path / "again", progress=False)
    assert len(dataset.split("train")) == 1
    assert place.exists()  # The old data may be prepared again within a week.


def test_an_error_leaves_nothing(data: config.Data, tmp_path: Path) -> None:
    interrupted_after(3, data, tmp_path / "again", RuntimeError)
    assert not [*tmp_path.glob(".*")]
