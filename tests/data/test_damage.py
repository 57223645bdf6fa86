"""Tests that damaged token stores, and stores with contradictory content, are refused."""

import json
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest

from brt.config import Data
from brt.data import preparation, stores
from brt.data.preparation import Dataset
from brt.errors import DataError


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """Returns the directory of a prepared dataset, which tests must not change."""
    place = tmp_path_factory.mktemp("corpus")
    for i in range(3):
        (place / f"{i}.txt").write_text(f"document {i}\n" * 9)
    data = Data(train=(f"{place}/*.txt",), validation=(), test=(), validation_fraction=0.3,
                test_fraction=0.0)  # fmt: skip
    return preparation.prepare(data, place / "corpus", progress=False).directory


@pytest.fixture
def dataset(prepared: Path, tmp_path: Path) -> Path:
    """Returns a copy of the prepared dataset, which a test may damage."""
    return Path(shutil.copytree(prepared, tmp_path / "corpus"))


def read_all(directory: Path) -> Dataset:
    """Opens a dataset and reads everything that users of a dataset read."""
    dataset = preparation.prepare(Data(store=str(directory)))
    preparation.summary(dataset)
    dataset.described()
    return dataset


@pytest.mark.parametrize(
    "change, said",
    [
        ({"key": 5}, "key is 5, which is no str"),
        ({"splits": None}, "splits is None, which is no list"),
        (
            {"splits": ["train", "../../other"]},
            r"corpus\.json has the splits train, \.\./\.\./other",
        ),
        ({"sources": {"train": [{"name": "a"}]}}, "bytes is missing"),
        ({"tokenizer": {"name": "x", "file": "../t.json"}}, r"corpus\.json names .*'\.\./t\.json'"),
        (
            {"tokenizer": {"name": "x", "file": "t.model"}},
            r"corpus\.json names 't\.model', which is not",
        ),
        ({"held_out": []}, "held_out is .., which is no dict"),
    ],
    ids=lambda x: str(x)[:20],
)
def test_what_a_corpus_says_is_checked(change, said, dataset):
    path = dataset / "corpus.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(DataError, match=rf"is damaged \(.*{said}.*\); delete .*prepare it again"):
        read_all(dataset)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"offsets": np.array([0, 90, 20, 198])}, "rows do not fill"),
        ({"offsets": np.array([0, 2**62, -(2**62), 198])}, "rows do not fill"),
        ({"offsets": np.array([0.0, 20.0, 90.0, 198.0])}, "rows do not fill"),
        ({"offsets": np.array([1, 99, 198])}, "rows do not fill"),
        ({"offsets": np.array([[0, 198]])}, "rows do not fill"),
        ({"offsets": np.zeros(0, int)}, "rows do not fill"),
        ({"words": np.array([1.5, np.nan])}, "words is no column of finite numbers"),
        ({"names": np.frombuffer(b"{}", np.uint8)}, "a part of names is {}, which is no str"),
        (
            {"names": np.frombuffer(b"[" * 9**5 + b"]" * 9**5, np.uint8)},
            "Brackets too deep",
        ),
        ({"bytes": np.array(7)}, "bytes is no column"),
        ({"names": np.array(["a"], object)}, r"names\.npy is not an array of numbers or text"),
    ],
    ids=lambda x: str(x)[:20],
)
def test_columns_that_do_not_fit_are_refused(change, said, dataset):
    path = dataset / "train" / "rows.npz"
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    np.savez(path, **{**arrays, **change})
    with pytest.raises(DataError, match=rf"train is damaged \(({said}).*\); delete .* and prepare"):
        read_all(dataset)


def test_memory_is_asked_for_what_a_file_can_hold(dataset):
    """A file is refused before memory is allocated even if header and zip directory both claim
    terabytes.
    """
    path = dataset / "train" / "rows.npz"
    header = b"{'descr': '<i8', 'fortran_order': False, 'shape': (500000000000,), }"
    member = b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("more.npy", member)
        archive.filelist[-1].file_size = archive.filelist[-1].compress_size = (
            len(member) + 4 * 10**12
        )
    with pytest.raises(DataError, match=r"train is damaged \(it claims more bytes than it has"):
        read_all(dataset)


def test_a_damaged_cache_says_so(tmp_path):
    (tmp_path / "a.txt").write_text("some text\n" * 9)
    data = Data(train=(f"{tmp_path}/a.txt",), validation_fraction=0.0, test_fraction=0.0,
                cache_dir=str(tmp_path / "cache"))  # fmt: skip
    path = preparation.prepare(data, progress=False).directory / "corpus.json"
    for content in (path.read_bytes()[:40], path.read_bytes().replace(b'"key": "', b'"key": "0')):
        path.write_bytes(content)
        with pytest.raises(DataError, match="is damaged.*; delete"):
            preparation.prepare(data, progress=False)


@pytest.mark.parametrize("places", [[-1], [3], [0.5]])
def test_indices_that_point_outside_of_a_store_are_refused(places):
    with pytest.raises(ValueError, match="x points where nothing is"):
        stores.check_indices("x", np.array(places), 3)
