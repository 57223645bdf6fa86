"""Tests which files sources consist of, also through links, and that unread ones are counted."""

import glob
import hashlib
import os
from pathlib import Path

import pytest

from brt.data import sources, tokenizers
from brt.data.sources import CLOSED, DEAD, walk
from brt.errors import DataError


@pytest.fixture
def books(tmp_path):
    """Returns a directory with text files, one of them compressed, and another file."""
    for name in ("b.txt", "a.txt", "deep/c.txt.gz", "notes.md", "a[1].tex"):
        path = tmp_path / "books" / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(name)
    return tmp_path / "books"


def names(source):
    """Returns the names of the files that a source consists of, in order."""
    return [file.path.name for file in sources.files(str(source))]


def test_directories_and_globs_are_sorted(books):
    assert names(books) == ["a.txt", "a[1].tex", "b.txt", "c.txt.gz", "notes.md"]
    assert names(books / "a[1].tex") == ["a[1].tex"], "a name that looks like a pattern"
    assert names(books / "*.txt") == ["a.txt", "b.txt"]
    assert names(books / "**" / "*.gz") == ["c.txt.gz"]
    assert names(books / "notes.md") == ["notes.md"]
    assert names(books.parent / "b*") == names(books)


def test_what_is_missing_is_named(tmp_path, books):
    (tmp_path / "empty").mkdir()
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "corpus.json").write_text("{}")
    for source, message in (
        (tmp_path / "no.txt", r"no\.txt does not exist"),
        (books / "*.rst", r"the pattern .*\*\.rst matches no file"),
        ("x" * 5000, "xxx does not exist"),  # longer than the names of files
        (tmp_path / "empty", r"the directory .*empty has no \*\.txt, \*\.md or other text"),
        (tmp_path / "store", r"has no \*\.txt, .* file.*; set Data\.store"),
        ("corpus:plays", "corpus:plays does not exist; there are corpus:novels/test, corpus"),
        ("corpus:../../..", "does not exist; there are"),
    ):
        with pytest.raises(DataError, match=message):
            sources.files(str(source))


def test_a_changed_file_has_another_hash(books):
    before = sources.hashes([str(books)])
    assert before[0] == (str(books / "a.txt"), 5, hashlib.sha256(b"a.txt").hexdigest())
    (books / "a.txt").write_text("b.txt")  # The size stays the same.
    after = sources.hashes([str(books)])
    assert before[0] != after[0]
    assert before[1:] == after[1:]


@pytest.mark.parametrize(
    ("name", "endings", "count"), [("novels", [".txt"], 5), ("summaries", [".jsonl"], 3)]
)
def test_the_texts_of_brt_are_those_that_the_readme_lists(name, endings, count):
    listed = (sources.CORPORA / name / "README.md").read_text()
    splits = [f"corpus:{name}/{split}" for split in ("train", "validation", "test")]
    found = sources.hashes(splits, endings)
    assert len(found) == count
    for file in found:
        assert f"{file.sha256}  {file.name.removeprefix(f'corpus:{name}/')}" in listed
        assert f"| {file.bytes} |" in listed


PATTERNS = ("**/*.txt", "**", "*/**/c*", "d/**/*.txt", "./**/a.txt", "**/e/**/*.txt", "d/**/e/*",
            "**/[[]x]/*", "d**/*.txt")  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("absolute", [False, True])
def test_patterns_match_what_glob_does(pattern, absolute, tmp_path, monkeypatch):
    for name in ("a.txt", "d/b.txt", "d/e/c.txt", "d/e/e/a.txt", "f/e/[x]/c.txt", ".h/a.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.chdir(tmp_path)
    pattern = f"{tmp_path}/{pattern}" if absolute else pattern
    expected = {
        os.path.normpath(p) for p in glob.glob(pattern, recursive=True) if os.path.isfile(p)
    }
    found = [str(file.path) for file in sources.files(pattern)]
    assert expected and sorted(found) == sorted(expected)


def test_links_that_lead_in_circles_are_followed_once(books):
    for i in range(3):  # glob would follow 3 ** 40 paths.
        (books / f"self{i}").symlink_to(".")
    outside = books.parent / "outside"
    outside.mkdir()
    (outside / "d.txt").write_text("elsewhere")
    (books / "zlink").symlink_to(outside)
    (books / "alias.txt").symlink_to("b.txt")
    assert names(books / "**" / "*.txt") == ["a.txt", "alias.txt", "d.txt"]


def test_what_may_have_no_end_is_no_source(tmp_path):
    os.mkfifo(tmp_path / "f.txt")
    for name in (tmp_path / "f.txt", tmp_path / "f.*", "/dev/zero"):
        with pytest.raises(DataError, match="is neither a file nor a directory; write its"):
            sources.files(str(name))
    os.mkfifo(tmp_path / "f.model")
    with pytest.raises(DataError, match=r"f\.model cannot be read: it is not a regular file"):
        tokenizers.load(str(tmp_path / "f.model"))
    for path in ("f.txt", "a\0b"):
        with pytest.raises(DataError, match=r"cannot be read: (it is not a regular|embedded null)"):
            sources.hashed(sources.File(path, tmp_path / path))


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """Returns a directory with links to files, to other directories, to itself and to nothing."""
    for name in ("shelf/far.txt", "shelf/deep/farther.txt", "books/near.txt", "books/b/c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "books/more").symlink_to(tmp_path / "shelf")
    (tmp_path / "shelf/back").symlink_to(tmp_path / "books")
    (tmp_path / "books/again").symlink_to("b")
    (tmp_path / "books/gone.txt").symlink_to("../.git/annex/objects/none")
    return tmp_path / "books"


def test_a_directory_gives_what_a_pattern_gives(linked: Path) -> None:
    found = names(linked)
    assert sorted(found) == ["c.txt", "far.txt", "farther.txt", "near.txt"]
    (linked / "gone.txt").unlink()
    assert sorted(names(f"{linked}/**/*.txt")) == sorted(found)
    assert [str(file.path) for file in sources.files(str(linked))][0] == f"{linked}/b/c.txt"
    (linked / "other.txt").symlink_to("near.txt")
    assert len(names(linked)) == len(found), "a file of several names is read once"


def test_links_to_nothing_are_counted_or_refused(linked: Path) -> None:
    assert sources.left_out(str(linked)) == f"{linked} contains files that are not read: 1 {DEAD}"
    with pytest.raises(DataError, match=r"gone\.txt"):
        names(f"{linked}/**/*.txt")
    for name in ("near.txt", "b/c.txt", "more", "again"):
        (linked / name).unlink()
    with pytest.raises(DataError, match=rf"has no .* file, but 1 {DEAD}; "):
        names(linked)


def test_folders_that_cannot_be_read_are_counted_or_refused(
    linked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = os.scandir

    # Permissions do not stop root, so the error is raised here.
    def scandir(place: Path | str) -> object:
        if Path(place).name == "b":
            raise PermissionError(13, "Permission denied", str(place))
        return listed(place)

    monkeypatch.setattr(os, "scandir", scandir)
    assert (linked / "b", CLOSED) in walk(linked).missed
    assert f"1 {CLOSED}" in sources.left_out(str(linked))
    with pytest.raises(
        DataError, match="directory .*/b cannot be read: Permission denied; make it"
    ):
        names(f"{linked}/**/*.txt")
