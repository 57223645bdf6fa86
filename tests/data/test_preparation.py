import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from brt import config
from brt.data import preparation, tokenizers
from brt.errors import DataError


@pytest.fixture
def books(tmp_path):
    directory = tmp_path / "books"
    directory.mkdir()
    for i in range(6):
        (directory / f"{i}.txt").write_text(f"Book {i}.\n" + f"It has some words of {i}. " * 40)
    return directory


@pytest.fixture
def data(tmp_path, books):
    """Returns a function that makes a section Data from the books and changed settings."""

    def make(**settings):
        settings = {"train": (str(books),), "validation": (), "test": (), **settings}
        return config.Data(cache_dir=str(tmp_path / "cache"), **settings)

    return make


def prepare(data, output=None):
    return preparation.prepare(data, output, progress=False)


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


def command(*args, directory):
    """Runs `python -m brt.prepare` in a directory."""
    return subprocess.run(
        [sys.executable, "-m", "brt.prepare", *map(str, args)],
        capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(preparation.Path(preparation.__file__).parents[2])},
        cwd=directory,
    )  # fmt: skip


@pytest.mark.slow  # This test runs commands as processes; quick tests cover what commands call.
def test_brt_prepare_counts_all_bytes_and_names_the_setting_for_its_store(books, tmp_path):
    flags = ["--documents", "books/*.txt", "--tokenizer", "train:300", "--output", "out"]
    done = command(*flags, directory=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines() if line}
    size = sum(path.stat().st_size for path in books.iterdir())
    counted = sum(int(rows[s][3].replace(",", "")) for s in ("train", "validation", "test"))
    assert counted == size
    assert "trained on 100.0% of the train text" in done.stdout
    assert "--gin_bindings='Data.store = \"out\"'" in done.stdout
    other = command(*flags[:-3], "bytes", *flags[-2:], directory=tmp_path)
    assert (other.returncode, other.stdout) == (3, "")
    assert other.stderr.splitlines()[-1].endswith(
        "out contains something else; delete it or name another directory"
    )
