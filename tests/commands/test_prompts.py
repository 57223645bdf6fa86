"""Tests that prompts from files, stdin and flags are decoded and checked as documents are."""

import gzip
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from brt import api, generate
from brt.config import Config, Training
from brt.data.tokenizers import ByteTokenizer
from brt.errors import ConfigError, DataError
from brt.training.saved_model import SavedModel
from brt.training.workdir import Workdir

GOOD = {
    b"\xef\xbb\xbfIt was.": "It was.",
    b"a\r\nb\rc\n": "a\r\nb\rc\n",
    "a\u2028b\x0cc\x85".encode(): "a\u2028b\x0cc\x85",
}
BAD = {
    b"It was\0a": "has a NUL at character 6",
    b"caf\xe9": "is not UTF-8 at byte 3",
    b"PAR1....": "is a Parquet file",
    ("It was late. " * 9).encode("utf-16-le"): "is UTF-16LE",
}
Ways = Callable[[bytes], str]


@pytest.fixture(params=["file", "gz", "stdin"])
def read(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ways:
    """Returns a function that passes bytes as a prompt in one of three ways and returns the text
    that `brt.generate` reads.
    """

    def prompt(content: bytes) -> str:
        path = tmp_path / ("p.txt.gz" if request.param == "gz" else "p.txt")
        path.write_bytes(gzip.compress(content) if request.param == "gz" else content)
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content)))
        return generate._prompt(None, "-" if request.param == "stdin" else str(path), False)

    return prompt


def test_line_ends_are_kept_and_a_mark_is_dropped(read: Ways) -> None:
    for content, text in GOOD.items():
        assert read(content) == text


def test_what_is_no_text_is_refused(read: Ways) -> None:
    for content, message in BAD.items():
        with pytest.raises(DataError, match=message):
            read(content)


@pytest.mark.parametrize("ending", [b"", b"\n", b"\r\n"])
def test_each_line_is_a_prompt(tmp_path: Path, ending: bytes) -> None:
    path, packed = tmp_path / "p.txt", tmp_path / "p.jsonl.gz"
    path.write_bytes(b"\xef\xbb\xbfa b \r\n {}" + ending)
    assert generate._rows(str(path)) == [{"prompt": "a b "}, {"prompt": " {}"}]
    rows = [{"id": 7, "prompt": "a\nb"}, {"prompt": "\u20ac", "more": [None]}]
    packed.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode() + ending))
    assert generate._rows(str(packed)) == rows


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("p.txt", b"a\n\nb", r"p\.txt:2 is empty; write a prompt into every line"),
        ("p.txt", b"", r"p\.txt has no prompts"),
        ("p.txt", b"a\ncaf\xe9", r"p\.txt:2 is not UTF-8 at byte 3"),
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt"}', r"p\.jsonl:2 is not JSON: Expecting"),
        ("p.jsonl", b'{"text": "a"}', r'p\.jsonl:1 has no text as "prompt"; write'),
        ("p.jsonl", b'{"prompt": "a"}\n["b"]', r'p\.jsonl:2 has no text as "prompt"; write'),
        ("p.jsonl", b'{"prompt": "\\ud800"}', r"p\.jsonl:1 has half a surrogate pair"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=said):
        generate._rows(str(tmp_path / name))


@pytest.mark.parametrize("flag", ["load_state", "save_state"])
def test_several_prompts_have_no_state(flag: str, tmp_path: Path) -> None:
    flags = ["--workdir=run", "--prompts=p.txt", f"--{flag}={tmp_path}/s.npz"]
    with pytest.raises(ConfigError, match=f"^--{flag} is for a single text, not for --prompts"):
        generate.main(generate.parser().parse_args(flags))


def test_a_prompt_on_the_command_line() -> None:
    assert generate._prompt("\ufeffIt was\r\n", None, False) == "It was\r\n"
    with pytest.raises(DataError, match="--prompt has half a surrogate pair at character 1"):
        generate._prompt("a\ud83d", None, False)


@pytest.mark.parametrize("text", ["half \ud83d", "a\0b"])
def test_python_refuses_prompts_that_are_no_text(text: str) -> None:
    config = Config(training=Training(task="language_modeling"))
    model = api.Model(SavedModel(Workdir(Path("run")), 1, config, {}, {}))
    model.tokenizer = ByteTokenizer()
    for function in (model._tokens, model.stream, model.bits_per_byte):
        with pytest.raises(DataError, match=r"^the (text|prompt) has (half a|a NUL at)"):
            function(text)
    assert model._tokens("\ufeffa").tolist() == [97]
