"""Tests how documents are prepared, and which are held out if the user names no other splits."""

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from brt import config
from brt.data import preparation, sources, tokenizers
from brt.data.preparation import Dataset, DocumentPreparation
from brt.errors import DataError

Make = Callable[..., config.Data]


@pytest.fixture
def books(tmp_path):
    directory = tmp_path / "books"
    directory.mkdir()
    for i in range(6):
        (directory / f"{i}.txt").write_text(f"Book {i}.\n" + f"It has some words of {i}. " * 40)
    return directory


@pytest.fixture
def data(tmp_path, books) -> Make:
    """Returns a function that makes a section Data from training files, with an empty cache.

    Without files, the section has the books.
    """

    def make(*train: Path | str, **settings: object) -> config.Data:
        names = tuple(map(str, train or [books]))
        return config.Data(train=names, cache_dir=str(tmp_path / "cache"), **settings)

    return make


def prepare(section: config.Data, output: Path | None = None, progress: bool = False) -> Dataset:
    return preparation.prepare(section, output, progress=progress)


def texts(dataset):
    """Returns the texts of all documents, by split."""
    return {
        split: [tokenizers.decode(dataset.tokenizer, store.document(i)) for i in range(len(store))]
        for split, store in dataset.splits.items()
    }


def test_without_sources_the_embedded_novels_are_prepared(tmp_path):
    dataset = prepare(config.Data(cache_dir=str(tmp_path)))
    assert {split: len(store) for split, store in dataset.splits.items()} == {
        "train": 3, "validation": 1, "test": 1,
    }  # fmt: skip
    assert dataset.split("train").tokens.size == 317783 + 684034 + 360517
    assert dataset.tokenizer.name == "bytes"


def test_splits_share_the_documents(data, books):
    found = texts(prepare(data()))
    assert {split: len(text) for split, text in found.items()} == {
        "train": 4, "validation": 1, "test": 1,
    }  # fmt: skip
    everything = sorted(text for split in found.values() for text in split)
    assert everything == sorted(path.read_text() for path in books.iterdir())
    assert texts(prepare(data())) == found


def test_a_changed_file_never_meets_a_stale_store(data, books):
    path = books / "3.txt"
    first = prepare(data())
    status = path.stat()
    path.write_text(path.read_text().replace("Book", "Cook"))  # The size stays the same.
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # Restore the modification time.
    second = prepare(data())
    assert second.directory != first.directory
    assert any("Cook 3" in text for split in texts(second).values() for text in split)
    path.write_text(path.read_text().replace("Cook", "Book"))
    assert prepare(data()).directory == first.directory


def test_a_changed_tokenizer_is_another_store(data, tmp_path):
    trained = prepare(data(tokenizer="train:300")).directory / "tokenizer.model"
    model = tmp_path / "my.model"
    model.write_bytes(trained.read_bytes())
    first = prepare(data(tokenizer=str(model)))
    assert (first.directory / "tokenizer.model").read_bytes() == trained.read_bytes()
    model.write_bytes((prepare(data(tokenizer="train:310")).directory / model.name.replace(
        "my", "tokenizer")).read_bytes())  # fmt: skip
    second = prepare(data(tokenizer=str(model)))
    assert (first.tokenizer.vocab_size, second.tokenizer.vocab_size) == (300, 310)


def test_the_tokenizer_is_trained_on_the_train_split_only(data, books, tmp_path):
    held_out = tmp_path / "held_out.txt"
    held_out.write_text("zyxwzyxwzyxw " * 400)
    dataset = prepare(data(validation=(str(held_out),), tokenizer="train:320"))
    assert texts(dataset)["validation"] == [held_out.read_text()]
    model = (dataset.directory / "tokenizer.model").read_bytes()
    assert b"zyx" not in model and b"words" in model
    assert preparation.read_manifest(dataset.directory)["tokenizer"]["coverage"]["fraction"] == 1


def test_what_was_prepared_is_opened_as_it_is(data, tmp_path, books):
    first = prepare(data(tokenizer="train:300"), tmp_path / "out")
    assert first.directory == tmp_path / "out"
    for path in books.iterdir():
        path.unlink()
    again = prepare(data(store=str(tmp_path / "out")))
    assert texts(again) == texts(first)
    assert again.tokenizer.fingerprint == first.tokenizer.fingerprint
    with pytest.raises(DataError, match="nowhere holds no finished preparation"):
        prepare(data(store=str(tmp_path / "nowhere")))
    with pytest.raises(DataError, match="nowhere is not in .*; name the whole path"):
        prepare(data(store="nowhere"))


def test_an_output_with_other_content_is_refused(data, tmp_path):
    out = tmp_path / "out"
    prepare(data(), out)
    assert prepare(data(), out).directory == out
    for directory in (out, tmp_path / "file", tmp_path / "full"):
        if directory.name == "file":
            directory.write_text("")
        if directory.name == "full":
            directory.mkdir()
            (directory / "letter.txt").write_text("keep me")
        with pytest.raises(
            DataError, match=f"{directory} contains something else; delete it or name"
        ):
            prepare(data(tokenizer="train:300"), directory)
    assert (tmp_path / "full" / "letter.txt").read_text() == "keep me"


def test_a_mixed_up_tokenizer_is_refused(data, tmp_path):
    small, large = (prepare(data(tokenizer=f"train:{n}"), tmp_path / f"{n}") for n in (300, 310))
    (small.directory / "tokenizer.model").write_bytes(
        (large.directory / "tokenizer.model").read_bytes()
    )
    with pytest.raises(DataError, match="train was written with another tokenizer than tokenizer"):
        prepare(data(store=str(small.directory)))


def test_a_failed_preparation_leaves_nothing(data, books, tmp_path):
    (books / "4.txt").write_bytes(b"broken \xff")
    with pytest.raises(DataError, match=r"4\.txt is not UTF-8 at byte 7"):
        prepare(data())
    assert not [*(tmp_path / "cache").iterdir()]
    assert len(prepare(data(errors="replace")).splits) == 3


def test_preparing_twice_at_the_same_time(data, tmp_path):
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(prepare, [data(tokenizer="train:300")] * 4)]
    assert len({dataset.directory for dataset in found}) == 1
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [found[0].directory.name]
    assert all(texts(dataset) == texts(found[0]) for dataset in found)


def test_progress_is_one_line_per_split_without_a_terminal(data, capsys):
    preparation.prepare(data())
    lines = capsys.readouterr().err.splitlines()
    part = "(5% of the documents of Data.train)"
    assert [line.split(":")[0] for line in lines] == [
        "prepared train", f"prepared validation {part}", f"prepared test {part}",
    ]  # fmt: skip
    preparation.prepare(data())
    assert capsys.readouterr().err == ""


def book(seed: int, paragraphs: int = 80) -> str:
    """Returns a random text of paragraphs, each of which begins with the seed and its number."""
    words = "the sea was calm and grey while we sat on the deck of an old ship".split()
    draw = np.random.default_rng(seed)
    lines = (" ".join(draw.choice(words, draw.integers(9, 40))) for _ in range(paragraphs))
    return "\n\n".join(f"{seed}.{i} {line}." for i, line in enumerate(lines)) + "\n"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_the_end_of_one_file_is_held_out_at_paragraphs(
    data: Make, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    text = book(1, 300)
    dataset = prepare(data(write(tmp_path / "input.txt", text)), progress=True)
    (train,), (validation,), (test,) = (texts(dataset)[s] for s in ("train", "validation", "test"))
    assert train + validation + test == text
    assert train.endswith("\n\n") and validation.endswith("\n\n")
    for part in (validation, test):
        assert 0.03 < len(part) / len(text) < 0.07
    place = len(train)
    assert dataset.split("train").names == (f"{tmp_path}/input.txt[:{place}]",)
    assert dataset.split("test").names == (f"{tmp_path}/input.txt[{place + len(validation)}:]",)
    said = "5% of each document of Data.train, at its end"
    assert f"prepared validation ({said}): 1 document," in capsys.readouterr().err
    assert dataset.described()["test"]["held_out"] == said


def test_text_beyond_a_chunk_and_without_paragraphs(
    data: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("brt.data.contents.CHUNK", 1000)
    for text in (book(2, 300).replace("\n\n", " "), "é" * 9000, book(3, 300)):
        found = texts(prepare(data(write(tmp_path / "a.txt", text), test_fraction=0.0)))
        assert list(found) == ["train", "validation"]
        assert found["train"][0] + found["validation"][0] == text


def test_two_documents_lose_their_ends_and_three_are_shared(data: Make, tmp_path: Path) -> None:
    files = [write(tmp_path / f"{i}.txt", book(i)) for i in range(3)]
    two, three = (texts(prepare(data(*files[:count]))) for count in (2, 3))
    assert [len(two[split]) for split in two] == [2, 2, 2]
    assert [a + b + c for a, b, c in zip(*two.values(), strict=True)] == [book(0), book(1)]
    assert {split: len(found) for split, found in three.items()} == dict.fromkeys(three, 1)
    assert sorted(text for found in three.values() for text in found) == [book(i) for i in range(3)]


def test_a_short_document_is_refused(data: Make, tmp_path: Path) -> None:
    short = write(tmp_path / "note.txt", "Not much to learn from.")
    message = (
        r"note\.txt has 23 characters, too few to hold out its end for validation and test \(at "
        r"least 100 each\); train on more text, or name files with Data\.validation and Data\.test"
    )
    with pytest.raises(DataError, match=message):
        prepare(data(short))
    alone = prepare(data(short, validation_fraction=0.0, test_fraction=0.0))
    assert list(alone.splits) == ["train"]


def test_copies_of_a_document_are_in_the_same_split(data: Make, tmp_path: Path) -> None:
    rows = [{"text": book(i)} for i in (*range(8), *range(8))]
    found = texts(prepare(data(write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows))))))
    contents = [set(own) for own in found.values()]
    assert all(len(own) == 2 * len(set(own)) for own in found.values())
    assert sum(map(len, contents)) == 8 == len(set.union(*contents))


def test_a_document_in_two_named_splits_is_refused(data: Make, tmp_path: Path) -> None:
    a, b = (
        write(tmp_path / f"{name}.jsonl", "\n".join(json.dumps({"text": book(i)}) for i in own))
        for name, own in (("a", (1, 2)), ("b", (3, 2)))
    )
    message = r"b\.jsonl:2 of validation has the same text as .*a\.jsonl:2 of train; take it out"
    with pytest.raises(DataError, match=message):
        prepare(data(a, validation=(str(b),), test_fraction=0.0))


def test_directories_of_code_are_read_and_what_is_not_is_counted(
    data: Make, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    place = tmp_path / "project"
    for i, name in enumerate(("a.py", "README.md", "deep/b.rs", "paper.TEX")):
        write(place / name, book(i))
    for name in (
        "a.csv",
        "b.csv",
        "package.json",
        "x.png",
        "Makefile",
        ".git/config.txt",
        ".hidden.py",
    ):
        write(place / name, "{\n}")
    write(place / "__init__.py", "")
    dataset = prepare(data(place), progress=True)
    assert sum(map(len, dataset.splits.values())) == 4
    said = capsys.readouterr().err
    assert f"{place} contains files that are not read: 2 *.csv, " in said
    assert all(f"1 {what}" in said for what in ("*.png", "*.json", "no suffix", "empty"))
    assert sources.left_out(str(place / "a.py")) == ""


def test_one_split_is_prepared_without_a_look_at_the_others(data: Make, tmp_path: Path) -> None:
    train, test = (write(tmp_path / f"{n}.txt", book(i)) for i, n in enumerate(("train", "test")))
    section = data(train, test=(str(test),), validation_fraction=0.0, tokenizer="train:300")
    whole = prepare(section)
    train.unlink()
    alone = DocumentPreparation(section, False).open_split("test", whole.tokenizer)
    assert alone.directory != whole.directory and list(alone.splits) == ["test"]
    assert alone.split("test").fingerprint == whole.split("test").fingerprint
    known = DocumentPreparation(section).open_split("test", whole.tokenizer, whole.directory)
    assert known.directory == whole.directory
    test.write_text(book(5))
    changed = DocumentPreparation(section).open_split("test", whole.tokenizer, whole.directory)
    assert texts(changed)["test"] == [book(5)]
    with pytest.raises(DataError, match="there are no validation documents; name some with Data"):
        DocumentPreparation(section).open_split("validation", whole.tokenizer)


def test_a_part_of_train_is_found_again_where_it_was_prepared(data: Make, tmp_path: Path) -> None:
    section = data(write(tmp_path / "input.txt", book(4, 200)))
    whole = prepare(section)
    again = DocumentPreparation(section, False).open_split("test", whole.tokenizer)
    assert texts(again)["test"] == texts(whole)["test"] and again.directory != whole.directory
    (tmp_path / "input.txt").unlink()
    known = DocumentPreparation(section).open_split("test", whole.tokenizer, whole.directory)
    assert known.directory == whole.directory
