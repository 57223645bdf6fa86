"""Tests memory tasks: each document states the facts that its answers need, and no document of
another split states the same facts.
"""

import hashlib
import re
from collections import Counter, defaultdict

import pytest

from brt.config import Data
from brt.data import documents, preparation
from brt.data.memory_tasks import Answer, answers
from brt.errors import DataError

pytestmark = pytest.mark.slow_cases("tracking", "counting")

TASKS = {  # the parameters of each task, and the probability that a guess is right
    "copy": ("distance=40&length=4", 0.0),
    "recall": ("distance=40", 0.0),
    "needle": ("distance=150&size=600", 0.0),
    "tracking": ("distance=100&size=300", 1 / 3),
    "counting": ("distance=20&size=200", 1 / 10),
}
each = pytest.mark.parametrize("task", TASKS)


def texts(task: str, split: str, count: int, more: str = "") -> dict[str, bytes]:
    """Returns documents of a memory task by name; `more` has further parameters of the task."""
    source = f"memory:{task}/{split}/{count}?{TASKS[task][0]}{more}"
    return {d.name: "".join(d.chunks).encode() for d in documents.read([source])}


def asked(found: dict[str, bytes]) -> list[tuple[bytes, Answer]]:
    """Returns every answer in the documents, with the text of its document."""
    return [(text, answer) for name, text in found.items() for answer in answers(name, text)]


@each
def test_who_reads_a_document_knows_its_answers(task: str) -> None:
    found = texts(task, "test", 60)
    least = int(re.findall(r"distance=(\d+)", TASKS[task][0])[0])
    per_document = {"recall": 4, "needle": 3, "tracking": 2}.get(task, 1)
    solved = asked(found)
    assert len(solved) == 60 * per_document
    for text, answer in solved:
        assert text[answer.start : answer.stop] == answer.text
        assert text[answer.start - 1 : answer.start] == b">" and text[answer.stop :][:1] == b"<"
        near = 15 if task == "needle" else 0  # An inserted event moves to the next space.
        assert answer.start - answer.stated >= least - near
    assert sum(text.count(b">") for text in found.values()) == len(solved), "no other marks"


def test_the_distance_is_exact_where_nothing_else_is_between() -> None:
    found = texts("copy", "train", 6, "&distance=32,64,500")
    assert [a.start - a.stated for _, a in asked(found)] == [32, 64, 500] * 2


@each
def test_the_byte_before_says_nothing(task: str) -> None:
    follows: dict[int, Counter] = defaultdict(Counter)
    for text in texts(task, "train", 300).values():
        for before, after in zip(text, text[1:], strict=False):
            follows[before][after] += 1
    likeliest = {before: after.most_common(1)[0][0] for before, after in follows.items()}
    solved = asked(texts(task, "test", 200))
    right = sum(
        all(likeliest.get(text[i - 1]) == text[i] for i in range(a.start, a.stop))
        for text, a in solved
    )
    assert right / len(solved) <= TASKS[task][1] + 0.1


@each
def test_no_answer_of_one_split_is_told_in_another(task: str) -> None:
    told = {}
    for split in ("train", "validation", "test"):
        found = texts(task, split, 150)
        # These tasks have few different answers, so compare the sequences of events instead.
        if task in ("tracking", "counting"):
            marks = rb"\w+ (?:goes to|takes) the \w+\." if task == "tracking" else rb"\*|\."
            told[split] = {tuple(re.findall(marks, text)) for text in found.values()}
        else:
            told[split] = {answer.text for _, answer in asked(found)}
    assert not told["train"] & told["test"] and not told["train"] & told["validation"]
    assert not told["validation"] & told["test"]


@each
def test_the_name_decides_every_byte(task: str) -> None:
    once, again = texts(task, "train", 5), texts(task, "train", 5)
    assert once == again
    longer = list(texts(task, "train", 8).values())
    assert longer[:5] == list(once.values()) and len(set(longer)) == 8
    for other in (texts(task, "train", 5, "&seed=1"), texts(task, "test", 5)):
        assert not set(other.values()) & set(once.values())


def test_bytes_are_the_same_on_every_machine() -> None:
    found = b"".join(text for task in TASKS for text in texts(task, "test", 3).values())
    assert hashlib.sha256(found).hexdigest()[:16] == "b635ffb852d7421a"


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("copy/train/9?size=50&distance=96", "distance=96 lies beyond its size=50 bytes"),
        ("recall/train/9?facts=9&symbols=8", "facts=9 is more than symbols=8, the keys"),
        ("recall/train/9?queries=5", "queries=5 must be from 1 to facts=4"),
        ("recall/train/9?symbols=99", "symbols=99 must be from 1 to 52"),
        ("tracking/train/9?facts=5", "facts=5 must be at least 6, a sentence for each"),
        ("tracking/train/9?queries=4", "queries=4 must be from 1 to symbols=3"),
        ("copy/train/9?length=2", "length=2 must be at least 3, so that train and test share"),
        ("copy/train/9?facts=2", "facts=2 must be SETTING=NUMBER; copy has distance, length"),
        ("copy/train/9?distance=far", "distance=far must be SETTING=NUMBER"),
        ("copy/train/0", "must be memory:TASK/SPLIT/COUNT, such as memory:copy/train/1000"),
        ("kopy/train/9", "tasks are copy, recall, needle, tracking, counting"),
        ("needle/test/9?size=999999", "size=999999 is more than the 20"),
        ("counting/test/9?size=8&distance=8&facts=1", "has no documents that no other split has"),
    ],
)
def test_what_cannot_be_met_is_refused_with_both_numbers(source: str, sentence: str) -> None:
    with pytest.raises(DataError) as refused:
        list(documents.read([f"memory:{source}"]))
    task, split, *_ = source.partition("?")[0].split("/")
    assert sentence in str(refused.value) and f"memory:{task}/{split}" in str(refused.value)


def test_held_out_documents_are_named_by_those_of_train() -> None:
    train = "memory:copy/train/40?distance=9"
    data = Data(train=(train, "books/*.txt"), validation_fraction=0.5)
    assert data.validation == ("memory:copy/validation/20?distance=9",)
    assert data.test == ("memory:copy/test/2?distance=9",)
    assert Data(train=(train,), test=("a.txt",)).test == ("a.txt",)
    assert Data(train=(train,), test_fraction=0.0).test == ()
    assert Data(train=("a.txt",)).test == (), "a part of train"


def test_memory_tasks_are_prepared_and_split_like_other_documents(tmp_path) -> None:
    train = ("memory:needle/train/6?size=400&distance=50", "memory:copy/train/4")
    data = Data(train=train, cache_dir=str(tmp_path))
    dataset = preparation.prepare(data, progress=False)
    assert [len(dataset.split(split)) for split in ("train", "validation", "test")] == [10, 2, 2]
    novels = dataset.described()["train"]["sources"]
    assert len(novels) == 3, "whose text is filler: were it another one, so would be the documents"
    assert dataset.described()["test"]["held_out"] == ""
