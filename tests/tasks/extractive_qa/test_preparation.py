"""Tests how questions in SQuAD's format become windows of tokens, and how answers in tokens become
characters again.
"""

import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from brt.config import Questions
from brt.errors import DataError
from brt.tasks.extractive_qa import preparation
from brt.tasks.extractive_qa.preparation import token_range, windows

CONTEXT = "Mars is red. Venus is the hottest planet, and caf\u00e9 is warm. Earth is blue."


def entry(id, text, *answers, **more):
    """Returns a question in SQuAD's format, with the positions of its answers in CONTEXT."""
    found = [{"text": a, "answer_start": CONTEXT.find(a)} for a in answers]
    return {"id": id, "question": text, "answers": found, **more}


QAS = [
    entry("a", "Which is red?", "Mars"),
    entry("b", "What is warm?", "caf\u00e9", "caf\u00e9 is warm"),
    entry("c", "What is blue?", "Earth"),
]


@pytest.fixture
def make(tmp_path):
    """Returns a function that writes questions about CONTEXT to a file and returns the section."""

    def config(qas=QAS, **settings):
        path = tmp_path / "train.json"
        if not isinstance(qas, str):
            paragraphs = [{"context": CONTEXT, "qas": qas}]
            qas = json.dumps({"version": "1", "data": [{"title": "t", "paragraphs": paragraphs}]})
        path.write_text(qas)
        given = {"train": (str(path),), "validation": (), "test": (), "max_length": 44, "stride": 8,
                 "max_question_length": 16, "cache_dir": str(tmp_path / "cache")}  # fmt: skip
        return Questions(**(given | settings))

    return config


def prepare(section):
    return preparation.QuestionPreparation(section, False).open()


@pytest.mark.parametrize("tokenizer", ["bytes", "train:310"])
def test_windows_give_back_answers_and_cover_the_context(make, tokenizer):
    store = prepare(make(tokenizer=tokenizer, max_length=36)).split("train")
    assert store.ids == ("a", "b", "c") and store.answers[1] == ("caf\u00e9", "caf\u00e9 is warm")
    assert len(store.texts) == 1 and len(store) > 3 and (store.lengths <= 36).all()
    found = {0: [], 1: [], 2: []}
    for row in range(len(store)):
        question, start, stop, first, last = store.window(row)
        ids = store.tokens(row)
        assert len(ids) == store.lengths[row]
        mask = store.context_mask(np.array([row, -1]), 40)
        assert mask[0].sum() == stop - start and not mask[1].any()
        np.testing.assert_array_equal(ids[np.flatnonzero(mask[0])], store.contexts[0][start:stop])
        assert mask[0][first] == (first > 0), "no answer: the first special id"
        found[question].append(store.text(row, first, last) if first else None)
    for question, texts in found.items():
        assert set(texts) <= {None, store.answers[question][0]} and any(texts)
    of_first = store.rows[store.rows[:, 0] == 0]
    assert of_first[0, 1] == 0 and of_first[-1, 2] == len(store.contexts[0])
    assert (of_first[:-1, 2] - of_first[1:, 1] == 8).all(), "the stride"


def test_windows_cover_a_text_and_share_the_stride():
    for length, room, stride in [(0, 5, 2), (5, 5, 2), (6, 5, 2), (30, 7, 6), (31, 7, 0)]:
        found = windows(length, room, stride)
        assert found[0].start == 0 and found[-1].stop == length
        assert all(b.start == a.stop - stride for a, b in zip(found, found[1:], strict=False))
        assert all(w.stop - w.start == room for w in found[:-1])


def test_the_tokens_of_a_range_of_characters_are_found():
    spans = np.array([[0, 2], [2, 2], [2, 5], [6, 9]])
    assert token_range(spans, 1, 3) == (0, 2) and token_range(spans, 2, 5) == (2, 2)
    assert token_range(spans, 4, 7) == (2, 3) and token_range(spans, 5, 6) is None


def test_answers_that_are_not_where_the_file_says_are_counted(make, capsys):
    bad = entry("x", "Which?", "Venus")
    bad["answers"][0]["answer_start"] += 1
    twice = entry("a", "Again?", "Mars")
    section = make([*QAS, bad, entry("n", "Who?"), twice, entry("q", " ", "Mars"), {"id": "z"}])
    with pytest.raises(DataError) as caught:
        prepare(section)
    message = str(caught.value)
    assert message.startswith(
        f"5 of 8 rows of train cannot be used: {section.train[0]}: data[0].paragraphs[0].qas[3] "
        "(x) has the answer 'Venus' at 14, where its context has 'enus '"
    )
    assert "(n) has no answer; Questions.no_answer = True would allow that" in message
    assert "(a) has the id of a question before it and 2 more; repair them, or continue" in message
    skipping = make([*QAS, bad], errors="skip")
    store = preparation.QuestionPreparation(skipping).open().split("train")
    assert store.ids == ("a", "b", "c") and store.manifest["rows"]["bad"] == 1
    assert "(x) has the answer 'Venus' at 14" in capsys.readouterr().err


def as_rows(qas):
    """Returns questions as the rows of a table, whose answers are one object with two lists."""
    rows = []
    for qa in qas:
        keys = ("text", "answer_start")
        answers = {key: [answer[key] for answer in qa["answers"]] for key in keys}
        rows.append({**qa, "title": "t", "context": CONTEXT, "answers": answers})
    return rows


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet", "arrow"])
def test_rows_are_the_same_questions(suffix, make, tmp_path):
    expected = prepare(make()).split("train")
    (tmp_path / "rows").mkdir()
    path, rows = tmp_path / "rows" / f"a.{suffix}", as_rows(QAS)
    table = pyarrow.Table.from_pylist(rows)
    if suffix == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif suffix == "json":
        path.write_text(json.dumps(rows))
    elif suffix == "parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pyarrow.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)
    (tmp_path / "rows" / "state.json").write_text('{"_split": "train"}')
    found = prepare(make(train=(str(path.parent),))).split("train")
    assert (found.ids, found.asked, found.texts) == (expected.ids, expected.asked, expected.texts)
    assert found.answers == expected.answers and (found.rows == expected.rows).all()


@pytest.mark.parametrize("rows", [QAS[:1], [entry("v", "Which?", "Pluto")]])
def test_a_tokenizer_is_not_trained_on_rows_that_cannot_be_used(rows, make):
    wrong = [{**row, "answers": {"text": ["x"], "answer_start": [0]}} for row in as_rows(rows)]
    with pytest.raises(DataError, match="1 of 1 rows of train cannot be used: .*has the answer"):
        prepare(make(json.dumps(wrong), tokenizer="train:300"))


def test_questions_without_an_answer(make):
    none = entry("n", "Who?", is_impossible=True)
    store = prepare(make([*QAS, none], no_answer=True)).split("train")
    assert store.answers[3] == () and not store.rows[store.rows[:, 0] == 3, 3:].any()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON: .* column 2"),
        ("[]", "has no question"),
        ('[{"text": "a"}]', "neither SQuAD's list 'data' nor the columns id, context, question"),
        ('{"data": []}', "has no question"),
        (
            '{"data": [{"paragraphs": [{"qas": []}]}]}',
            r"data\[0\].paragraphs\[0\] has no text 'con",
        ),
        ('{"data": [{"paragraphs": [{"context": "a"}]}]}', r"paragraphs\[0\] has no list 'qas'"),
    ],
)
def test_files_in_another_form_are_refused(make, text, message):
    with pytest.raises(DataError, match=message):
        prepare(make(text))


def test_made_up_questions_are_the_same_everywhere(make):
    section = make(train=("generated:t/12",), max_length=512, max_question_length=64)
    store = prepare(section).split("train")
    row = store.window(11)
    assert store.text(11, row.answer_start, row.answer_end) == store.answers[11][0]
    key = store.asked[11].split()[2]
    assert f"{key} is {store.answers[11][0]} ." in store.texts[11]
    assert prepare(make(train=("generated:t/3",))).split("train").texts[2] == store.texts[2]
