import json
from pathlib import Path

import pytest

from brt import train
from brt.config import Config, Data, Logging
from brt.config_io import config_from_json, difference, saved_json
from brt.errors import ConfigError
from brt.redaction import lacks_secret, redacted
from brt.training import workdir

SECRETS = {
    "https://me:pa55word@host/a.txt": "https://***@host/a.txt",
    "s3://key@bucket/x?version=2&access_token=abc123&y=1": (
        "s3://***@bucket/x?version=2&access_token=***&y=1"
    ),
    "https://host/a?X-Amz-Signature=0a1b": "https://host/a?X-Amz-Signature=***",
    "--hub_token=abc": "--hub_token=***",
    "WANDB_API_KEY=0123": "WANDB_API_KEY=***",
    "at hf_abcdefghijklmnopqrstuvwxyz0123": "at ***",
}
PLAIN = [
    "books/*.txt", "corpus:novels/train", "memory:copy/train/1000?distance=96", "tfds:pg19/train",
    "--max_tokens=400", "Sampling.max_tokens = 4", "me@host:/data", "a***b.txt",
    "--tokenizer=train:32000", "https://host/a@b",
]  # fmt: skip


@pytest.mark.parametrize("text", SECRETS)
def test_what_looks_like_a_secret_is_hidden(text: str) -> None:
    assert redacted(text) == SECRETS[text]
    assert redacted({"a": [text, 3, None], "b": (text,)}) == {
        "a": [SECRETS[text], 3, None], "b": (SECRETS[text],),
    }  # fmt: skip
    assert redacted(redacted(text)) == redacted(text)
    assert lacks_secret((SECRETS[text],)) != text.startswith("at ") and not lacks_secret(text)


@pytest.mark.parametrize("text", PLAIN)
def test_all_else_is_as_it_was(text: str) -> None:
    assert redacted(text) == text and not lacks_secret(text)


def test_a_saved_config_has_no_secret_and_is_the_same_run() -> None:
    source = "https://me:pa55word@host/a.txt"
    config = Config(data=Data(train=(source,)), logging=Logging(wandb_project="x"))
    saved = saved_json(config)
    assert "pa55word" not in json.dumps(saved) and saved["Logging"]["wandb_project"] == "x"
    assert difference(config_from_json(saved), config) == []
    other = Config(data=Data(train=("https://me:pa55word@host/b.txt",)), logging=config.logging)
    assert "pa55word" not in str(difference(config_from_json(saved), other))
    assert [name for name, *_ in difference(config_from_json(saved), other)] == ["Data.train"]


def test_the_command_is_written_down_without_its_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    binding = "--gin_bindings=Data.train = 'https://me:pa55word@host/a.txt'"
    monkeypatch.setattr("sys.argv", ["train.py", binding])
    assert "pa55word" not in json.dumps(workdir.provenance())
    assert "***@host/a.txt" in json.dumps(workdir.provenance())


def test_who_goes_on_without_the_secret_is_asked_for_it(tmp_path: Path) -> None:
    config = Config(data=Data(train=("https://me:pa55word@host/a.txt",)))
    workdir.write_json(workdir.Workdir(tmp_path).config_json, saved_json(config))
    with pytest.raises(ConfigError, match=r"^Data.train = .*@.* was saved without its secret"):
        train.main(train.parser().parse_args([f"--workdir={tmp_path}"]))
