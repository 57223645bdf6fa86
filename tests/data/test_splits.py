"""Tests that a part of the documents or rows is held out, always the same part."""

import json
import wave
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from brt import tasks
from brt.config import Config, Pairs, Questions, Sentences, Speech, Training
from brt.data import splits
from brt.data.splits import Shares
from brt.errors import DataError

BOTH = {"validation": 0.05, "test": 0.05}
NAMES = [f"books/{i}.txt" for i in range(100)]


def test_splits_have_the_fractions_of_documents_that_were_set():
    assert Counter(splits.assign(NAMES, BOTH)) == {"train": 90, "validation": 5, "test": 5}
    assert Counter(splits.assign(NAMES, {"test": 0.3})) == {"train": 70, "test": 30}


@pytest.mark.parametrize("count", range(3, 12))
def test_every_split_gets_a_document(count):
    for fractions in (BOTH, {"validation": 0.9, "test": 0.9}):
        assert set(splits.assign(NAMES[:count], fractions)) == {"train", "validation", "test"}


def test_the_file_name_decides_not_the_place():
    found = dict(zip(NAMES, splits.assign(NAMES, BOTH), strict=True))
    moved = [name.replace("books", "/elsewhere") for name in reversed(NAMES)]
    for name, split in zip(moved, splits.assign(moved, BOTH), strict=True):
        assert found[name.replace("/elsewhere", "books")] == split


pytestmark = pytest.mark.slow_cases("pairs")

WORDS = "the quick brown fox jumps over a lazy dog while seven wizards box".split()


def text(seed: int, count: int) -> str:
    return " ".join(np.random.default_rng(seed).choice(WORDS, count))


def pairs(place: Path, rows: range) -> Config:
    """Writes summarization pairs to a file and returns a config that reads the file."""
    lines = [
        json.dumps({"id": str(i), "document": text(i, 30), "summary": text(i, 8)}) for i in rows
    ]
    (place / "a.jsonl").write_text("\n".join(lines))
    section = Pairs(
        train=(str(place / "a.jsonl"),), tokenizer="train:290", max_source_length=48,
        max_target_length=12, cache_dir=str(place / "cache"),
    )  # fmt: skip
    return Config(pairs=section, training=Training(task="summarization"))


def sentences(place: Path, rows: range) -> Config:
    """Writes labeled sentences to a file and returns a config that reads the file."""
    lines = [json.dumps({"id": str(i), "sentence": text(i, 9), "label": i % 2}) for i in rows]
    (place / "a.jsonl").write_text("\n".join(lines))
    section = Sentences(train=(str(place / "a.jsonl"),), cache_dir=str(place / "cache"))
    return Config(sentences=section, training=Training(task="text_classification"))


def questions(place: Path, rows: range) -> Config:
    """Writes two questions about each context and returns a config that reads them."""
    paragraphs = []
    for i in rows:
        answers = [{"text": text(i, 12).split()[0], "answer_start": 0}]
        asked = [{"id": f"{i}{x}", "question": f"{x}?", "answers": answers} for x in "ab"]
        paragraphs.append({"context": text(i, 12), "qas": asked})
    (place / "a.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    section = Questions(train=(str(place / "a.json"),), cache_dir=str(place / "cache"))
    return Config(questions=section, training=Training(task="extractive_qa"))


def speech(place: Path, rows: range) -> Config:
    """Writes recordings of noise and returns a config that reads the recordings."""
    lines = ["file\ttranscript"]
    for i in rows:
        noise = np.random.default_rng(i).normal(size=2000) * 1000
        with wave.open(str(place / f"{i}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(8000)
            file.writeframes(noise.astype("<i2").tobytes())
        lines.append(f"{i}.wav\tfox {i % 3}")
    (place / "a.tsv").write_text("\n".join(lines))
    section = Speech(train=(str(place / "a.tsv"),), mel_bands=8, cache_dir=str(place / "cache"))
    return Config(speech=section, training=Training(task="speech_recognition"))


def ids(dataset: Any) -> dict[str, set[str]]:
    """Returns the ids of the rows of each split."""
    return {split: set(store.ids) for split, store in dataset.splits.items()}


@pytest.mark.parametrize("make", [pairs, sentences, questions, speech])
def test_rows_are_split_once_and_for_all(
    make: Callable[[Path, range], Config], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    config = make(tmp_path, range(40))
    dataset = tasks.from_config(config).open(config)
    found, each = ids(dataset), 2 if make is questions else 1
    assert {s: len(own) for s, own in found.items()} == {
        "train": 36 * each, "validation": 2 * each, "test": 2 * each,
    }  # fmt: skip
    assert len(set.union(*found.values())) == 40 * each
    said = "5% of the rows of Data.train"
    assert f"prepared test ({said}):" in capsys.readouterr().err
    assert dataset.described()["validation"]["held_out"] == said
    assert dataset.described()["train"]["sha256"] == dataset.split("train").fingerprint
    if make is questions:  # All questions about one context are in the same split.
        assert all({i[:-1] + x for i in own for x in "ab"} == own for own in found.values())
    if make is not speech:  # An additional row moves few other rows to another split.
        config = make(tmp_path, range(41))
        more = ids(tasks.from_config(config).open(config, progress=False))
        assert len(found["train"] - more["train"]) <= each


@pytest.mark.parametrize("make", [pairs, sentences, questions, speech])
def test_one_split_is_read_by_the_tokenizer_of_the_run(
    make: Callable[[Path, range], Config], tmp_path: Path
) -> None:
    config = make(tmp_path, range(40))
    task = tasks.from_config(config)
    dataset = task.open(config, progress=False)
    name, content = dataset.tokenizer.file
    (tmp_path / name).write_bytes(content)
    tokenizer = task.load_tokenizer(tmp_path / name)
    assert tokenizer.fingerprint == dataset.tokenizer.fingerprint
    if make is sentences:  # The config of a run contains the labels of its dataset.
        labels = dataset.split("train").labels
        section = Sentences(**{**vars(config.sentences), "labels": labels})
        config = Config(sentences=section, training=config.training)
    alone = task.open_split(config, "test", tokenizer)
    assert list(alone.splits) == ["test"] and alone.directory != dataset.directory
    assert alone.split("test").fingerprint == dataset.split("test").fingerprint
    known = task.open_split(config, "test", tokenizer, dataset.directory)
    assert known.directory == dataset.directory


def test_the_same_content_is_on_one_side_and_too_few_rows_are_refused() -> None:
    contents = [str(i % 50) for i in range(100)]
    split = Shares(contents, {"validation": 0.1, "test": 0.1}, "Data.train")
    assert [split(c) for c in contents[:50]] == [split(c) for c in contents[50:]]
    counts = [sum(split(c) == name for c in contents[:50]) for name in ("validation", "test")]
    assert counts == [5, 5]
    message = r"Data\.train has 2 different row\(s\), too few to hold some out for validation and"
    with pytest.raises(DataError, match=message):
        Shares(["a", "b", "a"], {"validation": 0.1, "test": 0.1}, "Data.train")
