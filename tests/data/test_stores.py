"""Tests stores and arrays in files and their comparison with hashes; damage is refused, and so
is contradictory content.
"""

import gc
import hashlib
import json
import os
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest

from brt.config import Data
from brt.data import lanes, manifests, preparation, sources, stores, token_store, tokenizers
from brt.data.documents import Document
from brt.data.preparation import Dataset
from brt.data.stores import OnDisk
from brt.errors import DataError


def test_a_store_is_compared_with_its_hashes_when_it_is_opened(tmp_path: Path) -> None:
    (tmp_path / "frames.bin").write_bytes(bytes(range(8)))
    stores.finish(tmp_path, {"ids": ["a", "b"], "sizes": np.arange(2)}, {})
    with stores.opened(tmp_path) as found:
        assert found.columns["ids"] == ("a", "b")
    (tmp_path / "frames.bin").write_bytes(bytes(8))
    with pytest.raises(
        DataError, match=r"^the store .* is damaged \(frames\.bin has the sha256 .*; delete it and"
    ):
        with stores.opened(tmp_path):
            pass
    with pytest.raises(DataError, match=r"frames\.bin has the sha256"):
        stores.verify(tmp_path)


@pytest.fixture(params=["|u1", "<u2", "<u4", "<f4"])
def numbers(request, tmp_path):
    """Returns random values, and the same values as an array on disk."""
    values = np.random.default_rng(0).integers(0, 200, 5000).astype(request.param)
    values.tofile(tmp_path / "numbers.bin")
    return values, OnDisk(tmp_path / "numbers.bin", values.dtype, len(values))


def test_what_is_read_is_what_an_array_has(numbers):
    values, stored = numbers
    assert len(stored) == stored.size == len(values)
    for part in (slice(None), slice(7, 19), slice(4990, 9999), slice(5, 5), slice(9, 3)):
        np.testing.assert_array_equal(stored[part], values[part])
    starts = np.random.default_rng(1).integers(1, 4900, (4, 3))
    places = starts[..., None] + np.minimum(np.arange(-1, 32), 20)
    for chosen in (places, places[:, :, ::-1], places[:0], np.zeros((2, 1), int)):
        np.testing.assert_array_equal(stored[chosen], values[chosen])
        assert stored[chosen].dtype == values.dtype


def test_a_file_that_is_cut_is_told_and_the_rest_of_it_is_read(numbers, tmp_path):
    values, stored = numbers
    os.truncate(tmp_path / "numbers.bin", 1000 * values.itemsize + 1)
    np.testing.assert_array_equal(stored[:1000], values[:1000])
    for read in (lambda: stored[:], lambda: stored[np.arange(900, 1100)[None]]):
        with pytest.raises(DataError, match=r"numbers\.bin was cut while it was being read"):
            read()


def test_a_file_is_closed_when_nobody_has_it_any_more(tmp_path):
    (tmp_path / "numbers.bin").write_bytes(bytes(10))
    before = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
    for _ in range(20):
        OnDisk(tmp_path / "numbers.bin", np.dtype("|u1"), 10)
    gc.collect()
    after = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
    assert after <= before + 1


def test_a_token_store_that_is_cut_while_it_is_read_is_damaged_data(tmp_path):
    found = [Document("a", iter(["word " * 5000]))]
    store = token_store.write(tmp_path / "s", found, tokenizers.load("bytes"))
    document = np.zeros((1, 2), np.int32)
    lanes.gather(store, document, np.array([[300, 301]]), window=64)
    os.truncate(tmp_path / "s/tokens.bin", 4096)
    lanes.gather(store, document, np.array([[3, 4]]), window=64)
    with pytest.raises(DataError, match=r"tokens\.bin was cut .* before byte .* of 25,000; delete"):
        lanes.gather(store, document, np.array([[300, 301]]), window=64)


def test_the_remedy_names_all_that_was_prepared_together(tmp_path):
    """The splits of a dataset are prepared together, so one damaged split spoils all of them."""
    found = [Document("a", iter(["words"]))]
    token_store.write(tmp_path / "corpus/train", found, tokenizers.load("bytes"))
    manifests.write(tmp_path / "corpus" / manifests.CORPUS, {})
    os.truncate(tmp_path / "corpus/train/tokens.bin", 2)
    with pytest.raises(DataError, match=r"; delete \S+/corpus and prepare it again"):
        token_store.TokenStore.open(tmp_path / "corpus/train")
    (tmp_path / "corpus/train/manifest.json").unlink()
    with pytest.raises(DataError, match=r"is missing\); delete \S+/corpus and prepare it again"):
        token_store.TokenStore.open(tmp_path / "corpus/train")


CONTENT = {"a.bin": b"some", "b.npz": b"more"}
HASHES = {name: hashlib.sha256(content).hexdigest() for name, content in CONTENT.items()}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a directory with the files in CONTENT; an empty cache directory is set."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "store").mkdir()
    for name, content in CONTENT.items():
        (tmp_path / "store" / name).write_bytes(content)
    return tmp_path / "store"


def sealed(place: Path) -> list[Path]:
    """Returns the cached notes about verified files."""
    return list(place.parent.glob("cache/brt/verified/*"))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list to which the name of every file is added whose hash is computed."""
    names, sha256 = [], sources.sha256

    def recorded(path: Path) -> str:
        names.append(path.name)
        return sha256(path)

    monkeypatch.setattr(sources, "sha256", recorded)
    return names


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes files count as old enough for the cache, although they were just written."""
    monkeypatch.setattr(stores, "SETTLED", -1.0)


def test_unchanged_files_are_verified_once(place: Path, read: list[str], later: None) -> None:
    for _ in range(3):
        stores.check_hashes(place, HASHES)
    assert read == ["a.bin", "b.npz"]
    stores.check_hashes(place, HASHES, whole=True)
    assert read == ["a.bin", "b.npz"] * 2


def test_a_change_is_found_whatever_its_time_and_size(place: Path, later: None) -> None:
    stores.check_hashes(place, HASHES)
    stat = (place / "a.bin").stat()
    (place / "a.bin").write_bytes(b"sOme")
    os.utime(place / "a.bin", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^a\.bin has the sha256 \w{12}, not a6b46dd0d1ae$"):
            stores.check_hashes(place, HASHES)
    (place / "a.bin").write_bytes(CONTENT["a.bin"])
    stores.check_hashes(place, HASHES)


def test_what_was_just_written_is_not_trusted(place: Path, read: list[str]) -> None:
    """A second write may leave the same modification time as the first write."""
    for _ in range(2):
        stores.check_hashes(place, HASHES)
    assert len(read) == 4 and not sealed(place)


def test_damage_that_leaves_no_trace_is_found_on_demand_and_not_forgotten(
    place: Path, later: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores.check_hashes(place, HASHES)
    monkeypatch.setattr(sources, "sha256", lambda path: "another")
    stores.check_hashes(place, HASHES)
    for whole in (True, False):
        with pytest.raises(ValueError, match=r"a\.bin has"):
            stores.check_hashes(place, HASHES, whole=whole)


def test_without_a_cache_files_are_read_each_time(
    place: Path, read: list[str], later: None
) -> None:
    (place.parent / "cache").touch()
    for _ in range(2):
        stores.check_hashes(place, HASHES)
    assert len(read) == 4
    (place / "b.npz").write_bytes(b"other")
    with pytest.raises(ValueError, match=r"b\.npz has"):
        stores.check_hashes(place, HASHES)


def test_a_copy_is_read_again_and_what_was_moved_is_not(
    place: Path, read: list[str], later: None
) -> None:
    stores.check_hashes(place, HASHES)
    stores.check_hashes(place.rename(place.with_name("moved")), HASHES)
    assert len(read) == 2
    stores.check_hashes(shutil.copytree(place.with_name("moved"), place), HASHES)
    assert len(read) == 4


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
        ({"names": np.frombuffer(b"[" * 9**5 + b"]" * 9**5, np.uint8)}, "Brackets too deep"),
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
