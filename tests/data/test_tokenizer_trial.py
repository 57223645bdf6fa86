"""Tests that foreign tokenizers take a bounded amount of memory and time, and that none panics."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from brt import bounded
from brt.data import text_tokenizers, tokenizers
from brt.data.tokenizer_training import train_sentencepiece
from brt.errors import DataError
from brt.interop.huggingface.kept import byte_tokenizer
from brt.tasks.summarization import tokenization as pairs

WORDS = "some words of a text, and some more words of another text, which has more words"
READERS: dict[str, Callable[[str], Any]] = {
    "language model": tokenizers.load,
    "encoder": text_tokenizers.load,
    "pairs": pairs.load,
}


def json_file(path: Path, **parts: Any) -> str:
    """Writes a byte-level tokenizer, with other parts, and returns its path."""
    described = json.loads(json.dumps(byte_tokenizer() | {"added_tokens": []} | parts))
    vocabulary = described["model"]["vocab"]
    vocabulary["<s>"] = vocabulary.pop("<|bos|>")
    described["model"]["vocab"] = vocabulary | {"</s>": 256, "<pad>": 257, "\u0100": 258}
    path.write_text(json.dumps(described))
    return str(path)


def replace(new: str, **pattern: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": new}


def precompiled(charsmap: bytes) -> dict[str, Any]:
    text = base64.b64encode(charsmap).decode()
    return {"type": "Precompiled", "precompiled_charsmap": text}


def sequence(*rules: dict[str, Any], of: str = "normalizers") -> dict[str, Any]:
    return {"type": "Sequence", of: rules}


def split(regex: str) -> dict[str, Any]:
    rule = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return {"pre_tokenizer": sequence(rule, LEVEL, of="pretokenizers")}


LEVEL = byte_tokenizer()["pre_tokenizer"]
CRAFTED: dict[str, dict[str, Any]] = {
    "doubles": {"normalizer": sequence(*[replace("aa", String="a")] * 40)},
    "doubles a rare character": {"normalizer": sequence(*[replace("ꙮꙮ", String="ꙮ")] * 40)},
    "doubles at an empty match": {"normalizer": sequence(*[replace("ꙮ", Regex="(?=ꙮ)")] * 40)},
    "long prefixes": {"normalizer": sequence(*[{"type": "Prepend", "prepend": "a" * 9999}] * 500)},
    "a table without a trie": {"normalizer": precompiled(bytes(64))},
    "a table of a long text": {"normalizer": precompiled(bytes(4) + b"a" * 9999)},
    "a search without end": split("(a+)+$"),
    "doubles decoded texts": {
        "decoder": sequence(*[replace("aa", String="a")] * 40, LEVEL, of="decoders")
    },
    "a long piece": {"model": byte_tokenizer()["model"] | {"vocab": {
        **byte_tokenizer()["model"]["vocab"], "a" * 99_999: 259,
    }}},
    "doubles bytes": {"pre_tokenizer": sequence(*[LEVEL] * 40, of="pretokenizers")},
}  # fmt: skip


@pytest.mark.slow_cases(
    "*-doubles bytes", "*-long prefixes", "encoder-a *", "pairs-a *", "encoder-doubles ?*",
    "pairs-doubles ?*",
)  # fmt: skip
@pytest.mark.parametrize("crafted", CRAFTED)
@pytest.mark.parametrize("reader", READERS)
def test_a_crafted_tokenizer_is_refused(reader: str, crafted: str, tmp_path: Path) -> None:
    path = json_file(tmp_path / "a.json", **CRAFTED[crafted])
    with pytest.raises(DataError, match="cannot be used: "):
        READERS[reader](path)


@pytest.mark.parametrize("reader", READERS)
def test_a_panic_of_the_library_is_an_error(reader: str, tmp_path: Path) -> None:
    tokenizer = READERS[reader](json_file(tmp_path / "a.json", **split("(ꙮ+)+$")))
    text = "ꙮ" * 40 + "b"
    with pytest.raises(DataError, match="gave up"):
        tokenizer.encode(text if reader == "language model" else [text])


def test_padding_and_truncation_of_the_file_are_ignored(tmp_path: Path) -> None:
    padding = {
        "strategy": {"Fixed": 10**12}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "a",
    }  # fmt: skip
    tokenizer = tokenizers.load(json_file(tmp_path / "a.json", padding=padding))
    assert len(tokenizer.encode("a text")) == 6


@pytest.mark.slow_cases("denormalizer", "unknown")
@pytest.mark.parametrize("crafted", ["normalizer", "denormalizer", "piece", "unknown"])
def test_a_crafted_sentencepiece_model_is_refused(crafted: str, tmp_path: Path) -> None:
    from sentencepiece import sentencepiece_model_pb2

    train_sentencepiece([[WORDS]], 290, tmp_path / "a.model")
    model = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]  # generated code
    model.ParseFromString((tmp_path / "a.model").read_bytes())
    match crafted:
        case "piece":
            model.pieces[-1].piece = "b" * 99_999
        case "unknown":
            model.trainer_spec.unk_surface = "b" * 99_999
        case _:
            getattr(model, f"{crafted}_spec").precompiled_charsmap = bytes(4) + b"b" * 9999
    (tmp_path / "a.model").write_bytes(model.SerializeToString())
    with pytest.raises(DataError, match="cannot be used: "):
        tokenizers.load(str(tmp_path / "a.model"))


def test_a_file_is_tried_once_and_none_that_brt_has_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = json_file(tmp_path / "a.json", version="1.0")
    tokenizers.load(path)
    train_sentencepiece([[WORDS + "."]], 290, tmp_path / "a.model")
    monkeypatch.setattr(bounded, "_tried", set())
    monkeypatch.setattr("subprocess.run", None)
    tokenizers.load(path)
    tokenizers.load(str(tmp_path / "a.model"))
    json_file(tmp_path / "a.json", truncation=None, version="1.1")
    with pytest.raises(TypeError):
        tokenizers.load(path)
