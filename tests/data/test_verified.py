"""Tests that files are compared with their hashes: once while they do not change, and whenever a
full check is requested.
"""

import hashlib
import os
import shutil
from pathlib import Path

import pytest

from brt.data import sources, stores

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
