import hashlib

import pytest

from brt.data import sources
from brt.errors import DataError


@pytest.fixture
def books(tmp_path):
    for name in ("b.txt", "a.txt", "deep/c.txt.gz", "notes.md"):
        path = tmp_path / "books" / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(name)
    return tmp_path / "books"


def names(source):
    return [file.path.name for file in sources.files(str(source))]


def test_directories_and_globs_are_sorted(books):
    assert names(books) == ["a.txt", "b.txt", "c.txt.gz", "notes.md"]
    assert names(books / "*.txt") == ["a.txt", "b.txt"]
    assert names(books / "**" / "*.gz") == ["c.txt.gz"]
    assert names(books / "notes.md") == ["notes.md"]
    assert names(books.parent / "b*") == ["a.txt", "b.txt", "c.txt.gz", "notes.md"]


def test_a_file_whose_name_looks_like_a_glob(tmp_path):
    (tmp_path / "a[1].txt").write_text("text")
    assert names(tmp_path / "a[1].txt") == ["a[1].txt"]


def test_what_is_missing_is_named(tmp_path, books):
    (tmp_path / "empty").mkdir()
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "corpus.json").write_text("{}")
    for source, message in (
        (tmp_path / "no.txt", r"no\.txt does not exist"),
        (books / "*.tex", r"the pattern .*\*\.tex matches no file"),
        (tmp_path / "empty", r"the directory .*empty has no \*\.txt, \*\.md or other text"),
        (tmp_path / "store", r"has no \*\.txt, .* text file; set Data\.store"),
        ("corpus:plays", "corpus:plays does not exist; there are corpus:novels/test, corpus"),
        ("corpus:../../..", "does not exist; there are"),
    ):
        with pytest.raises(DataError, match=message):
            sources.files(str(source))


def test_a_changed_file_has_another_hash(books):
    before = sources.hashes([str(books)])
    assert before[0] == (str(books / "a.txt"), 5, hashlib.sha256(b"a.txt").hexdigest())
    (books / "a.txt").write_text("b.txt")  # the same size
    after = sources.hashes([str(books)])
    assert before[0] != after[0]
    assert before[1:] == after[1:]


def test_the_novels_are_those_that_the_readme_lists():
    listed = (sources.CORPORA / "novels" / "README.md").read_text()
    found = [file for split in ("train", "validation", "test")
             for file in sources.hashes([f"corpus:novels/{split}"])]  # fmt: skip
    assert len(found) == 5
    for file in found:
        assert f"{file.sha256}  {file.name.removeprefix('corpus:novels/')}" in listed
        assert f"| {file.bytes} |" in listed


def test_the_summaries_are_those_that_the_readme_lists():
    listed = (sources.CORPORA / "summaries" / "README.md").read_text()
    found = [file for split in ("train", "validation", "test")
             for file in sources.hashes([f"corpus:summaries/{split}"], [".jsonl"])]  # fmt: skip
    assert len(found) == 3
    for file in found:
        assert f"{file.sha256}  {file.name.removeprefix('corpus:summaries/')}" in listed
        assert f"| {file.bytes} |" in listed
