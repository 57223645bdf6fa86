"""Tests that a dataset which was prepared with old settings is not used after a setting changed."""

import dataclasses
import json
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import brt.tasks  # noqa: F401  # This import registers the layer kinds and the tasks.
from brt.config import Data, Pairs, Questions, Sentences, Speech
from brt.config.fields import settings
from brt.config.names import section_types
from brt.data import preparation
from brt.errors import DataError
from brt.tasks.extractive_qa import preparation as questions
from brt.tasks.speech_recognition import preparation as speech
from brt.tasks.summarization import preparation as pairs
from brt.tasks.text_classification import preparation as sentences

WORDS = "the quick brown fox jumps over a lazy dog while seven wizards box".split()


class Example(NamedTuple):
    """A section that is quickly prepared, and a different value for each of its fields.

    Attributes:
      preparation: the class that prepares the section.
      section: the section.
      others: the different values by name of the field.
    """

    preparation: Callable[..., Any]
    section: Any
    others: dict[str, Any]


def text(seed: int, count: int) -> str:
    return " ".join(np.random.default_rng(seed).choice(WORDS, count))


def write_rows(path: Path, *rows: dict[str, Any]) -> tuple[str, ...]:
    path.write_text("\n".join(map(json.dumps, rows)))
    return (str(path),)


def of_data(place: Path) -> Example:
    rows = [{"text": text(i, 9), "other": text(-i % 99, 7)} for i in range(12)]
    (place / "bad.txt").write_bytes(b"not \xff UTF-8")
    empty = {"text": "", "other": text(30, 7)}
    some = (*write_rows(place / "a.jsonl", *rows, empty), str(place / "bad.txt"))
    other = write_rows(place / "b.jsonl", {"text": text(50, 9), "other": "b"})
    section = Data(train=some, validation=(), test=(), errors="replace", max_bad_records=5)
    written = preparation.prepare(
        dataclasses.replace(section, train=some[:1]), place / "written", progress=False
    )
    return Example(preparation.DocumentPreparation, section, {
        "train": some[:1], "validation": other, "test": other, "store": str(written.directory),
        "tokenizer": "train:290", "columns": ("text=other",), "errors": "strict",
        "max_bad_records": 0,
        "validation_fraction": 0.4, "test_fraction": 0.4,
        "curriculum": (),  # Only memory tasks can have a curriculum.
        "score_ends": "no",
    })  # fmt: skip


def of_pairs(place: Path) -> Example:
    def row(i: int) -> dict[str, Any]:
        return {"id": str(i), "document": text(i, 30), "summary": text(i + 50, 9),
                "number": -i, "longer": text(i, 31), "headline": text(i, 3)}  # fmt: skip

    some = write_rows(place / "a.jsonl", *map(row, range(8)), {"id": "empty"})
    others = [write_rows(place / f"{i}.jsonl", row(i)) for i in (20, 21)]
    section = Pairs(
        train=some, validation=others[0], test=(),
        columns=("source=document", "target=summary", "id=id"),
        tokenizer="train:290", max_source_length=24, max_target_length=8,
        errors="skip",
    )  # fmt: skip
    return Example(pairs.PairPreparation, section, {
        "train": others[1], "validation": (), "test": others[1],
        "columns": ("source=longer", "target=headline", "id=number"), "tokenizer": "train:300",
        "prefix": "dogs: ", "max_source_length": 20, "max_target_length": 6,
        "buckets": (12, 24), "errors": "refuse",
    })  # fmt: skip


def of_speech(place: Path) -> Example:
    lines = ["file\ttranscript\tspeaker\tsplit"]
    said = ("a fox", "a dog", "the fox", "box", "dogs", "a box")
    for i, (words, speaker, seconds, split) in enumerate(
        zip(said, "aabbab", (0.4, 0.5, 0.7, 0.6, 0.4, 0.5), ["train"] * 4 + ["x", "y"], strict=True)
    ):
        lines.append(f"{i}.wav\t{words}\t{speaker}\t{split}")
        noise = np.random.default_rng(i).normal(size=round(8000 * seconds)) * (1 + i)
        write_wav(place / f"{i}.wav", noise)
    write_wav(place / "short.wav", np.random.default_rng(9).normal(size=400))
    lines.append("short.wav\ttoo many words\tc\ttrain")
    (place / "a.tsv").write_text("\n".join(lines))
    split = {name: (f"{place / 'a.tsv'}:{name}",) for name in ("train", "x", "y")}
    section = Speech(
        train=split["train"], validation=split["x"], test=(), join=2, mel_bands=8, errors="skip"
    )
    return Example(speech.SpeechPreparation, section, {
        "train": split["y"], "validation": (), "test": split["y"], "unit": "words", "join": 1,
        "join_orders": 2, "sample_rate": 16_000, "mel_bands": 10, "normalization": "none",
        "stack": 3, "buckets": (60, 100), "errors": "refuse", "time_masks": (1, 3),
        "feature_masks": (1, 3), "beams": 4,
    })  # fmt: skip


def write_wav(path: Path, samples: np.ndarray) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes((samples * 1000).astype("<i2").tobytes())


def of_sentences(place: Path) -> Example:
    def table(name: str, *rows: int) -> tuple[str, ...]:
        lines = ["sentence\tother\tlabel\tkind\tnumber"]
        lines += [f"{text(i, 6)}\t{text(i, 8)}\t{i % 2}\t{i % 3}\t{i}" for i in rows]
        (place / name).write_text("\n".join([*lines, *["\tempty\t0\t0\t99"] * ("a" in name)]))
        return (str(place / name),)

    section = Sentences(
        train=table("a.tsv", *range(10)), validation=table("b.tsv", 21, 22), test=(),
        columns=("first=sentence", "label=label"), max_length=24, errors="skip",
    )  # fmt: skip
    return Example(sentences.SentencePreparation, section, {
        "train": table("c.tsv", *range(30, 34)), "validation": (), "test": table("d.tsv", 40, 41),
        "columns": ("first=other", "second=other", "label=kind", "id=number"),
        "header": ("other", "sentence", "label", "kind", "number"),
        "labels": ("1", "0"), "tokenizer": "train:300", "max_length": 20, "buckets": (12, 24),
        "errors": "refuse",
    })  # fmt: skip


def of_questions(place: Path) -> Example:
    def about(name: str, *rows: int) -> tuple[str, ...]:
        paragraphs = []
        for i in rows:
            context, answer = text(i, 12), text(i, 12).split()[3]
            answers = [{"text": answer, "answer_start": context.index(answer)}]
            asked = [{"id": f"{i}", "question": text(-i % 99, 4), "answers": answers}]
            asked += [{"id": f"{i} no", "question": "And?", "answers": []}] * (name == "a.json")
            paragraphs.append({"context": context, "qas": asked})
        (place / name).write_text(json.dumps({"data": [{"title": "t", "paragraphs": paragraphs}]}))
        return (str(place / name),)

    section = Questions(
        train=about("a.json", 1, 2, 3), validation=about("b.json", 4), test=(), max_length=48,
        stride=8, max_question_length=16, errors="skip",
    )  # fmt: skip
    return Example(questions.QuestionPreparation, section, {
        "train": about("c.json", 5, 6), "validation": (), "test": about("d.json", 7),
        "tokenizer": "train:300", "max_length": 40, "stride": 4, "max_question_length": 12,
        "max_answer_length": 3, "no_answer": True, "buckets": (40, 48),
        "errors": "refuse",
    })  # fmt: skip


EXAMPLES = {
    Data: of_data, Pairs: of_pairs, Speech: of_speech, Sentences: of_sentences,
    Questions: of_questions,
}  # fmt: skip
# The different values of these fields make the preparation fail.
REFUSES = "errors", "max_bad_records", "sample_rate"
FIELDS = [
    pytest.param(kind, field.name, id=f"{kind.__name__}.{field.name}")
    for kind in EXAMPLES
    for field in dataclasses.fields(kind)
]


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Callable[[type], tuple[Example, Any]]:
    """Returns a function from the type of a section to the section's example and outcome.

    The example has a cache directory that no other example uses. Results are reused.
    """
    made: dict[type, tuple[Example, Any]] = {}

    def find(kind: type) -> tuple[Example, Any]:
        if kind not in made:
            place = tmp_path_factory.mktemp(kind.__name__)
            found = EXAMPLES[kind](place)
            section = dataclasses.replace(found.section, cache_dir=str(place / "cache"))
            found = found._replace(section=section)
            made[kind] = found, outcome(found, section)
        return made[kind]

    return find


def outcome(example: Example, section: Any) -> dict[str, bytes] | str:
    """Prepares a section and returns the content of every file, or the error text."""
    try:
        directory = example.preparation(section, progress=False).open().directory
    except DataError as error:
        return str(error)
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def content(found: dict[str, bytes] | str) -> dict[str, bytes] | str:
    """Removes the files that repeat the settings, and therefore always change with a setting."""
    if isinstance(found, str):
        return found
    return {
        name: file
        for name, file in found.items()
        if not name.endswith(("manifest.json", preparation.MANIFEST))
    }


@pytest.mark.slow_cases("Speech.*", "Pairs.*")
@pytest.mark.parametrize(("kind", "field"), FIELDS)
def test_a_changed_setting_is_prepared_as_in_an_empty_cache(
    example: Callable[[type], tuple[Example, Any]], kind: type, field: str, tmp_path: Path
) -> None:
    found, before = example(kind)
    assert isinstance(before, dict), before
    value = str(tmp_path / "own") if field == "cache_dir" else found.others[field]
    changed = dataclasses.replace(found.section, **{field: value})
    fresh = outcome(found, dataclasses.replace(changed, cache_dir=str(tmp_path / "fresh")))
    assert outcome(found, changed) == fresh, f"{kind.__name__}.{field} meets a stale cache"
    if settings(kind)[field].cached or field == "store":  # Data.store replaces the cache.
        assert content(fresh) != content(before), f"the example does not depend on {field}"
        assert not isinstance(fresh, str) or field in REFUSES, fresh
    else:
        assert fresh == before, f"what is prepared depends on {field}"


def test_every_section_that_is_prepared_has_an_example() -> None:
    prepared = {
        kind for kind in section_types().values() if any(s.cached for s in settings(kind).values())
    }
    assert prepared == set(EXAMPLES)
