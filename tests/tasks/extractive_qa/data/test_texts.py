"""Tests that a text which no tokenizer accepts makes only its own question unusable."""

import json

import pytest

from brt.data.quarantine import BadRow
from brt.tasks.extractive_qa import squad

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
