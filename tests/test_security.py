"""Checks the statements of SECURITY.md about the sources and about files from others."""

import ast
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import brt.tasks  # noqa: F401  # registers the kinds of layers and the tasks
from brt import untrusted
from brt.config.names import declaration, field_types

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [*(ROOT / "brt").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]
FORBIDDEN = {
    "unpickles": r"^\s*(import|from) (pickle|dill|cloudpickle|shelve|marshal)\b",
    "lets NumPy unpickle": r"allow_pickle\s*=\s*True",
    "runs text": r"(?<![\w.])(eval|exec)\(",
    "fails where there is no home (user_files.local)": r"\)\.expanduser\(\)",
    "runs a shell": r"shell\s*=\s*True|os\.system\(",
}  # fmt: skip


def test_nothing_unpickles_or_runs_what_it_reads() -> None:
    found = [
        f"{path.relative_to(ROOT)} {what}: {line.strip()}"
        for path in SOURCES
        for line in path.read_text("utf-8").splitlines()
        for what, pattern in FORBIDDEN.items()
        if re.search(pattern, line)
    ]
    assert not found, found


def test_the_files_that_it_names_exist() -> None:
    text = (ROOT / "SECURITY.md").read_text("utf-8")
    named = re.findall(r"`((?:brt|tests|tools)/[\w/]+\.py)`", text)
    assert len(named) >= 3 and all((ROOT / name).exists() for name in named)


def test_a_setting_of_any_kind_may_be_true() -> None:
    untrusted.check({"early_stopping": True, "beams": 4}, {str: object})
    with pytest.raises(ValueError, match="beams is True, which is no int"):
        untrusted.check({"beams": True}, {"beams": int})


def test_every_setting_of_a_path_is_in_the_table() -> None:
    text = (ROOT / "SECURITY.md").read_text("utf-8")
    rows = text.partition("| setting |")[2].partition("\n\n")[0].splitlines()
    for name in field_types():
        found, path = [row for row in rows if f"`{name}`" in row], declaration(name).path
        assert len(found) == bool(path), name
        if path == "written":
            assert "never" in found[0] and "written" in found[0]


MAY_PARSE = {  # Files that may parse JSON by themselves, and the reason.
    "brt/untrusted.py": "all others use it",
    "brt/formatting.py": "what it has just written",
    "brt/data/chat.py": "messages between it and its child process",
    "brt/distributed/processes.py": "messages between processes of one run, which trust each other",
    "brt/interop/huggingface/decoder/modeling_brt.py": "lies beside an exported model, without brt",
    "brt/training/metrics.py": "told to untrusted.checked_json, with null for NaN",
    "brt/tasks/summarization/raw.py": "told to untrusted.parse_json",
}


def _parses_json(path: Path) -> bool:
    """Returns True if a file uses json.load, json.loads or json.JSONDecoder."""
    text = path.read_text("utf-8")
    return "json" in text and any(
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "json"
        and node.attr in ("load", "loads", "JSONDecoder")
        for node in ast.walk(ast.parse(text))
    )


def test_json_is_parsed_in_one_place() -> None:
    found = {str(p.relative_to(ROOT)) for p in (ROOT / "brt").rglob("*.py") if _parses_json(p)}
    assert found <= MAY_PARSE.keys(), found - MAY_PARSE.keys()


def test_a_shape_is_of_finite_numbers_of_64_bits_and_not_too_deep() -> None:
    shape = {"a": untrusted.NUMBER | None}
    for text in ('{"a": 1e999}', '{"a": NaN}', f'{{"a": {2**63}}}', '{"a": true}', '{"a": "1"}'):
        with pytest.raises(ValueError, match="a is .*, which is no int"):
            untrusted.checked_json(text, shape)
    for text in ('{"a": 1.5}', '{"a": null}', f'{{"a": {2**63 - 1}}}'):
        untrusted.checked_json(text, shape)
    with pytest.raises(ValueError, match="it nests deeper than 100 levels"):
        untrusted.checked_json("[" * 200 + "]" * 200, object)


def test_json_of_any_depth_is_processed_or_refused() -> None:
    """Replacing half surrogates needs several Python frames for each level."""
    for depth in (10, 190, 300, 900, 5000, 50_000):
        text = "[" * depth + '"\\ud800"' + "]" * depth
        try:
            value = untrusted.parse_json(text, halves="replace")
        except json.JSONDecodeError as error:
            assert error.msg == "Brackets too deep" and depth > 200
        else:
            assert depth <= 200 and isinstance(value, list)


@pytest.mark.parametrize("kind", [str, str.encode])
def test_crowded_json_is_refused_before_it_is_parsed(
    kind: Callable[[str], str | bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three bytes of the text would take 64 bytes of memory."""
    text = kind("[" + "[]," * (1 << 24) + "[]]")
    monkeypatch.setattr(json.JSONDecoder, "decode", None)
    with pytest.raises(json.JSONDecodeError):
        untrusted.parse_json(text)


def test_an_archive_that_unpacks_to_far_more_than_its_size_is_refused(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", a=np.zeros(1 << 27, np.uint8))
    with pytest.raises(ValueError), untrusted.npz(tmp_path / "a.npz"):
        pass
    with untrusted.npz(tmp_path / "a.npz", growth=None) as arrays:
        assert arrays["a"].shape == (1 << 27,)


HALVES = [
    '"\\ud83d"', '{"a": ["\\ud83dx"]}', '{"\\udc00": 1}', '["\\ude00\\ud83d"]', '"\\\\\\ud83d"',
]  # fmt: skip
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
