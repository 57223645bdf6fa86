"""Tests that half a surrogate pair is found anywhere in JSON, and that whole pairs are accepted."""

import json

import pytest

from brt import untrusted

HALVES = [
    '"\\ud83d"',
    '{"a": ["\\ud83dx"]}',
    '{"\\udc00": 1}',
    '["\\ude00\\ud83d"]',
    '"\\\\\\ud83d"',
]
WHOLE = ['"\\ud83d\\ude00"', '"\\\\ud83d"', '"\\\\\\\\ud83d"', '"\\uD83D\\uDE00x"', '"\U0001f600"']


@pytest.mark.parametrize("text", HALVES)
def test_halves_are_no_json_or_read_as_another_character(text: str) -> None:
    for given in (text, text.encode()):
        with pytest.raises(json.JSONDecodeError, match="Half a surrogate pair"):
            untrusted.parse_json(given)
    json.dumps(untrusted.parse_json(text, halves="replace"), ensure_ascii=False).encode()
    assert untrusted.parse_json(text, halves="keep") == json.loads(text)


@pytest.mark.parametrize("text", WHOLE)
def test_whole_surrogate_pairs_are_one_character(text: str) -> None:
    for halves in ("strict", "replace"):
        assert untrusted.parse_json(text, halves=halves) == json.loads(text)
