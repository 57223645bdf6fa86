"""Tests exact match and F1 against the official definition, and questions with unusable texts."""

import json

import pytest

from brt.data.quarantine import BadRow
from brt.tasks.extractive_qa import squad


@pytest.mark.parametrize(
    ("prediction", "answers", "exact", "f1"),
    [
        ("the Denver Broncos.", ("Denver  broncos",), 1, 1),
        ("a theme park", ("theme",), 0, 2 * 0.5 / 1.5),
        ("thean", ("the an",), 0, 0),  # Articles are removed only as whole words.
        ("re-use", ("reuse",), 1, 1),  # Punctuation is removed without a space in its place.
        ("x y y z", ("y y w", "q"), 0, 2 * (2 / 4) * (2 / 3) / (2 / 4 + 2 / 3)),
        ("in 1999", ("1998", "1999", "in the year 1999"), 0, 0.8),
        ("blue", ("green", "blue"), 1, 1),
        ("", (), 1, 1),
        ("anything", (), 0, 0),
        ("", ("something",), 0, 0),
        ("1\u00bd", ("1\u00bd",), 1, 1),
    ],
)
def test_an_answer_counts_as_the_best_of_what_people_said(prediction, answers, exact, f1):
    found = squad.score(prediction, answers)
    assert found == (exact, pytest.approx(f1))


def test_answers_of_nothing_but_articles_count_only_alone():
    assert squad.score("", ("the", "a")) == (1, 1)
    assert squad.score("", ("the", "cat")) == (0, 0)
    assert squad.score("cat", ("the", "a cat")) == (1, 1)


ANSWER = {"text": "copper", "answer_start": 0}


@pytest.mark.parametrize("field", ["context", "question", "id"])
@pytest.mark.parametrize(
    ("part", "problem"), [("\ud83d", "half a surrogate pair at"), ("\0", "a NUL at")]
)
def test_a_text_that_cannot_be_is_named(field, part, problem, tmp_path):
    values = {"context": "copper boxes", "question": "what?", "id": "q"}
    paragraphs = []
    for more in ("", part):
        own = values | ({field: values[field] + more} if more else {"id": "first"})
        asked = {"id": own["id"], "question": own["question"], "answers": [ANSWER]}
        paragraphs.append({"context": own["context"], "qas": [asked]})
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    good, bad = squad.read([str(path)], False)
    assert good.id == "first"
    assert isinstance(bad, BadRow)
    assert f"has {problem} character {len(values[field])} of its {field}" == bad.problem
