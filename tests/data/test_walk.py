"""Tests that directories are read through symbolic links and unreadable entries are counted."""

import os
from pathlib import Path

import pytest

from brt.data import sources
from brt.data.sources import CLOSED, DEAD, walk
from brt.errors import DataError


@pytest.fixture
def books(tmp_path: Path) -> Path:
    """Returns a directory with links to files, to other directories, to itself and to nothing."""
    for name in ("shelf/far.txt", "shelf/deep/farther.txt", "books/near.txt", "books/b/c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "books/more").symlink_to(tmp_path / "shelf")
    (tmp_path / "shelf/back").symlink_to(tmp_path / "books")
    (tmp_path / "books/again").symlink_to("b")
    (tmp_path / "books/gone.txt").symlink_to("../.git/annex/objects/none")
    return tmp_path / "books"


def names(source: Path | str) -> list[str]:
    """Returns the names of the files that a source consists of, in order."""
    return [file.path.name for file in sources.files(str(source))]


def test_a_directory_gives_what_a_pattern_gives(books: Path) -> None:
    found = names(books)
    assert sorted(found) == ["c.txt", "far.txt", "farther.txt", "near.txt"]
    (books / "gone.txt").unlink()
    assert sorted(names(f"{books}/**/*.txt")) == sorted(found)
    assert [str(file.path) for file in sources.files(str(books))][0] == f"{books}/b/c.txt"


def test_links_to_nothing_are_counted_or_refused(books: Path) -> None:
    assert sources.left_out(str(books)) == f"{books} contains files that are not read: 1 {DEAD}"
    with pytest.raises(DataError, match=r"gone\.txt"):
        names(f"{books}/**/*.txt")
    for name in ("near.txt", "b/c.txt", "more", "again"):
        (books / name).unlink()
    with pytest.raises(DataError, match=rf"has no .* file, but 1 {DEAD}; "):
        names(books)


def test_folders_that_cannot_be_read_are_counted_or_refused(
    books: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = os.scandir

    # Permissions do not stop root, so the error is raised here.
    def scandir(place: Path | str) -> object:
        if Path(place).name == "b":
            raise PermissionError(13, "Permission denied", str(place))
        return listed(place)

    monkeypatch.setattr(os, "scandir", scandir)
    assert (books / "b", CLOSED) in walk(books).missed
    assert f"1 {CLOSED}" in sources.left_out(str(books))
    with pytest.raises(
        DataError, match="directory .*/b cannot be read: Permission denied; make it"
    ):
        names(f"{books}/**/*.txt")


def test_a_file_of_several_names_is_read_once(books: Path) -> None:
    (books / "other.txt").symlink_to("near.txt")
    assert names(books).count("near.txt") + names(books).count("other.txt") == 1
