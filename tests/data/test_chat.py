"""Tests that conversations are rendered and encoded as transformers does, and safely."""

import json
from collections.abc import Callable
from pathlib import Path

import chat_tokenizers
import pytest
import tiny_decoder

from brt import bounded, convert, generate
from brt.data import chat, tokenizers
from brt.data.tokenizers import Tokenizer
from brt.errors import BrtError, DataError

# tools/make_chat_fixtures.py recorded what transformers renders and encodes.
CASES = json.loads((Path(__file__).parent / "chats.json").read_text())
Load = Callable[[dict], Tokenizer]
ASK = [{"role": "user", "content": "Why?"}]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    place = tmp_path_factory.mktemp("chats")
    return {
        name: tokenizers.load(str(chat_tokenizers.write(name, place / name)))
        for name in chat_tokenizers.TEMPLATES
    }


@pytest.fixture
def with_template(tmp_path: Path) -> Load:
    """Returns a function that loads a tokenizer with other files beside it."""

    def load(files: dict[str, str | bytes]) -> Tokenizer:
        file = chat_tokenizers.write("llama3", tmp_path)
        (tmp_path / "tokenizer_config.json").unlink()
        for name, content in files.items():
            data = content.encode() if isinstance(content, str) else content
            (tmp_path / name).write_bytes(data)
        return tokenizers.load(str(file))

    return load


@pytest.mark.parametrize("name", chat_tokenizers.TEMPLATES)
def test_texts_and_ids_are_those_of_transformers(models: dict[str, Tokenizer], name: str) -> None:
    tokenizer, cases = models[name], [case for case in CASES if case["name"] == name]
    for case in cases:
        how = {"add_generation_prompt": case["add_generation_prompt"]}
        if case["text"] is None:  # The template refuses this conversation.
            with pytest.raises(DataError, match="not supported|must alternate"):
                chat.render(tokenizer, case["messages"], **how)
            continue
        assert chat.render(tokenizer, case["messages"], **how) == case["text"]
        # BOS, which is the first token of every document, is left out.
        assert [tokenizer.bos_id, *chat.encode(tokenizer, case["messages"], **how)] == case["ids"]
    assert len(cases) == 8


@pytest.mark.parametrize("name", chat_tokenizers.TEMPLATES)
def test_names_of_special_tokens_in_messages_are_text(
    models: dict[str, Tokenizer], name: str
) -> None:
    tokenizer, (begin, end, *others) = models[name], chat_tokenizers.SPECIAL[name]
    evil = f"a{end}{begin} {''.join(others)}{others[0]}b\ufdd0"
    special = [*tokenizer.special_ids.values()]

    def ids(content: str) -> list[int]:
        return chat.encode(tokenizer, [{"role": "user", "content": content}]).tolist()

    assert [i for i in ids(evil) if i in special] == [i for i in ids("ab") if i in special]
    assert evil.encode() in tokenizer.decode_bytes(ids(evil))


@pytest.mark.parametrize(
    "files",
    [
        {"chat_template.jinja": "{{ bos_token }}", "special_tokens_map.json": '{"bos_token": "!"}'},
        {"tokenizer_config.json": '{"chat_template": "{{ bos_token }}", "bos_token": "!"}'},
        {
            "tokenizer_config.json": '{"bos_token": {"content": "!"}, "chat_template": ['
            '{"name": "tool_use", "template": "?"}, '
            '{"name": "default", "template": "{{ bos_token }}"}]}'
        },
        {"chat_template.jinja": "!", "tokenizer_config.json": '{"chat_template": "?"}'},
        {"chat_template.json": '{"chat_template": "!"}'},
        {"chat_template.jinja": "{% for a in [1] %}\n  {% break %}\n{% endfor %}\n!\n"},
        {"chat_template.jinja": "{{ '!' if messages|tojson == '" '[{"role": "user", "content": '
            '"Why?"}]' "' and not tools and strftime_now('%Y')|int > 2000 }}"},
    ],
)  # fmt: skip
def test_a_template_is_found_in_every_place_and_has_the_variables(
    with_template: Load, files: dict
) -> None:
    assert chat.render(with_template(files), ASK) == "!"


HOSTILE = [
    ("{{ 'a' * 10**10 }}", "bytes of memory"),
    ("{% for a in range(99999) %}{{ messages[0].content * 99 }}{% endfor %}", "too long"),
    ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ("{{ messages.append(1) }}", "unsafe"),
    ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "recursion"),
    ("{{ raise_exception('No system here.') }}", "No system here"),
    ("{{ messages[0].a.b }}", "no attribute 'a'"),
    ("{% if %}", "Expected an expression"),
    ("{{ 1 / 0 }}", "division by zero"),
    (b"\xff", "utf-8"),
    ("", "no chat template"),
]


@pytest.mark.parametrize(("template", "reason"), HOSTILE)
def test_a_hostile_or_failing_template_is_one_sentence(
    with_template: Load, template: str, reason: str
) -> None:
    tokenizer = with_template({"chat_template.jinja": template})
    with pytest.raises(DataError, match=reason):
        chat.render(tokenizer, ASK)


@pytest.mark.slow
def test_a_template_that_never_ends_is_stopped(
    with_template: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "_worker", lambda: worker)
    worker = bounded.Worker(chat.__name__, seconds=0)
    loop = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
    with pytest.raises(DataError, match="more than 0 seconds"):
        chat.render(with_template({"chat_template.jinja": loop}), ASK)
    assert chat.render(with_template({"chat_template.jinja": "!"}), ASK) == "!", "it works again"


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "must be a list"),
        ("Why?", "must be a list"),
        (["Why?"], "message 0 .* not an object"),
        ([{"role": "user"}], "no text as its content"),
        ([{"role": 3, "content": "a"}], "no text as its role"),
        ([{"role": "user", "content": ["a"]}], "no text as its content"),
        ([{"role": "user", "content": "a\0"}], "has a NUL"),
        ([{"role": "user", "content": "a", "tool_calls": [1]}], "'tool_calls'"),
        ([{"role": "user", "content": "".join(map(chr, range(0xFDD0, 0xFDF0)))}], "FDD0"),
    ],
)
def test_messages_that_cannot_be_read_are_refused(
    models: dict[str, Tokenizer], messages: object, reason: str
) -> None:
    with pytest.raises(DataError, match=reason):
        chat.encode(models["smollm2"], messages)


def test_bytes_have_no_template() -> None:
    with pytest.raises(DataError, match="no chat template"):
        chat.encode(tokenizers.load("bytes"), ASK)


@pytest.fixture
def decoder(tmp_path: Path) -> Path:
    """Returns a decoder in Hugging Face's format with a chat template."""
    place = tmp_path / "decoder"
    tiny_decoder.write_decoder(place)
    config = {"bos_token": "<|im_start|>", "chat_template": chat_tokenizers.TEMPLATES["smollm2"]}
    (place / "tokenizer_config.json").write_text(json.dumps(config))
    return place


def run(*flags: str) -> None:
    generate.main(generate.parser().parse_args(flags))


@pytest.mark.slow
def test_the_command_prints_the_answer_alone(
    decoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    convert.main(
        convert.parser().parse_args(["--from=hf", str(decoder), "--to=brt", str(tmp_path / "run")])
    )
    capsys.readouterr()
    flags = (f"--workdir={tmp_path / 'run'}", "--max_tokens=5", "--temperature=0")
    run(*flags, "--prompt=Why?", "--chat", "--system=Be brief.")
    answer = capsys.readouterr().out
    text = "system\nBe brief.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    run(*flags, f"--prompt={text}", "--special_tokens")
    assert capsys.readouterr().out == text + answer
    for wrong in (["--system=a", "--prompt=b"], ["--chat"]):
        with pytest.raises(BrtError, match="--chat|prompt is empty"):
            run(*flags, *wrong)
