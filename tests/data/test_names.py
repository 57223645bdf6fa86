"""Tests that files, documents and directories may have names of any bytes."""

import json
import os
from pathlib import Path

import pytest

import brt.tasks  # noqa: F401  # registers the kinds of layers and the tasks
from brt.bindings import COMMAND_LINE, resolve
from brt.config import Data
from brt.config_io import config_text
from brt.data import preparation, tokenizers
from brt.errors import ConfigError
from brt.gin_files import read_sources
from brt.training import workdir

NAMES = [
    b"caf\xe9.txt",
    b"caf\xe8.txt",
    "\u00e9.txt".encode(),
    "e\u0301.txt".encode(),
    b"a\nb.txt",
    b'it\'s "quoted", `so`.txt',
    b"a..b...txt",
    b"x" * 251 + b".txt",
    b"\x1b[31m.txt",
    b"=1+1|2.txt",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns a directory whose name and the names of whose files have unusual bytes."""
    place = Path(os.fsdecode(os.fsencode(tmp_path) + b"/d\xff"))
    place.mkdir()
    for i, name in enumerate(NAMES):
        (place / os.fsdecode(name)).write_text(f"text {i} " * 40)
    return place


@pytest.mark.parametrize("fraction", [0.0, 0.2])
def test_names_of_documents_are_the_names_of_files(fraction: float, folder: Path) -> None:
    data = Data(
        train=(str(folder),), validation_fraction=fraction, test_fraction=0.0,
        cache_dir=f"{folder} cache",
    )  # fmt: skip
    for directory in (None, Path(f"{folder} out"), folder.parent / ("y" * 255)):
        found = preparation.prepare(data, directory, progress=False)
        names = [name for store in found.splits.values() for name in store.names]
        assert sorted(map(os.fsencode, names)) == sorted(
            os.fsencode(folder) + b"/" + name for name in NAMES
        )
        assert all(Path(name).is_file() for name in names)
        described = json.dumps(found.described())
        assert json.loads(described)["train"]["sources"]
        again = preparation.prepare(Data(store=str(found.directory)))
        assert again.described() == found.described()


def test_a_tokenizer_may_be_in_such_a_place(folder: Path) -> None:
    data = Data(
        train=(str(folder),), validation_fraction=0.0, test_fraction=0.0, tokenizer="train:280"
    )
    first = preparation.prepare(data, Path(f"{folder} first"), progress=False)
    path = first.directory / "tokenizer.model"
    again = preparation.prepare(
        Data(train=data.train, tokenizer=str(path), validation_fraction=0.0, test_fraction=0.0),
        Path(f"{folder} again"), progress=False,
    )  # fmt: skip
    assert again.tokenizer.fingerprint == tokenizers.load(str(path)).fingerprint


def test_settings_keep_such_names(folder: Path) -> None:
    name = str(folder / os.fsdecode(NAMES[0]))
    config = resolve(read_sources([], [f"Data.train = '{name}'"])).config
    assert config.data.train == (name,)
    text = config_text(config)
    text.encode()
    assert resolve({COMMAND_LINE: read_sources([], [text])[COMMAND_LINE]}).config == config


def test_a_run_directory_that_checkpoints_cannot_use_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="is not UTF-8, which checkpoints need; rename it"):
        workdir.create(folder / "run")
    assert not (folder / "run").exists()


def test_texts_about_such_names_can_be_written(folder: Path, tmp_path: Path) -> None:
    workdir.write_text(tmp_path / "report.md", f"{folder}\n")
    assert (tmp_path / "report.md").read_text() == f"{tmp_path}/d\\udcff\n"
    workdir.write_json(tmp_path / "a.json", {"name": str(folder)})
    assert json.loads((tmp_path / "a.json").read_text()) == {"name": str(folder)}
