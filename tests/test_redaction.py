import json
import random
import re
import string
from pathlib import Path

import pytest

from brt import train
from brt.config import Config, Logging
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
    "https://me:pa/ss@wo?rd@host:8080/a": "https://***@host:8080/a",
    "https://h/a?key=AIzaSyA0aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa&y=1": "https://h/a?key=***&y=1",
    "https://h/a?sv=2024-11-04&sig=abc%2Fdef%3D": "https://h/a?sv=2024-11-04&sig=***",
    "--wandb_key=abcdef": "--wandb_key=***",
    "--a=1 --wandb_key=abcdef --b=2": "--a=1 --wandb_key=*** --b=2",
    "curl -H 'Authorization: Bearer abc.d3f-ghi'": "curl -H 'Authorization: Bearer ***'",
}
PLAIN = [
    "books/*.txt", "corpus:novels/train", "memory:copy/train/1000?distance=96", "tfds:pg19/train",
    "--max_tokens=400", "Sampling.max_tokens = 4", "me@host:/data", "a***b.txt",
    "--tokenizer=train:32000", "https://host/a@b", "https://host:8080/a@b", "books/***/a.txt",
    "sk-learn-experiments-2024-final", "hf_checkpoint_of_roberta_large", "monkey=4", "?keys=8",
    "--xla_dump_to=/tmp/dump --xla_force_host_platform_device_count=8",
    "glove-embeddings-840B-300d",
    "--cache_key=12", "https://h/list?key=3", "git@github.com:a/b.git",
    "runs/w512s64k8d1024h16l12m4096",
    "BlockRecurrentTransformer12LayersWindow512",
    "Optimizer.learning_rate = 1.2345678901234567e-05",
    "123456789012345678901234567890123456789012345678", "Sweep.baseline = 'gate=fixed,layout=skip'",
    "jax==0.10.2", "3f2504e0-4f89-11d3-9a0c-0305e82c3301", "2026-11-25T22:25:00.123456+00:00",
]  # fmt: skip


@pytest.mark.parametrize("text", SECRETS)
def test_what_looks_like_a_secret_is_hidden(text: str) -> None:
    assert redacted(text) == SECRETS[text]
    assert redacted({"a": [text, 3, None], "b": (text,)}) == {
        "a": [SECRETS[text], 3, None], "b": (SECRETS[text],),
    }  # fmt: skip
    assert redacted(redacted(text)) == redacted(text)
    assert lacks_secret((SECRETS[text],)) and not lacks_secret(text)


@pytest.mark.parametrize("text", PLAIN)
def test_text_without_secrets_is_unchanged(text: str) -> None:
    assert redacted(text) == text and not lacks_secret(text)


ALPHABETS = {
    "base62": string.ascii_letters + string.digits,
    "base64url": string.ascii_letters + string.digits + "-_",
    "base36": string.ascii_lowercase + string.digits,
    "hex": "0123456789abcdef",
    "upper": string.ascii_uppercase + string.digits,
}
# Texts with a secret key, by the alphabet and the length of the key. KEY stands for the key.
KEYS = {
    ("base62", 16): ["ghr_KEY", "ghp_KEY", "https://u:KEY@host/a", "--hub_token=KEY",
        "PASSWORD=KEY"],
    ("base62", 20): ["glrt-KEY", "glpat-KEY", "Authorization: Bearer 0KEY",
        "https://h/a?token=KEY"],
    ("base64url", 35): ["AIzaKEY", "https://h/?key=AIzaKEY&x=1", "gs://b/x?a=b&sig=KEY"],
    ("base62", 36): ["xapp-1-KEY", "xoxb-1-KEY", "npm_KEY", "wandb_v1_KEY", "hf_KEY"],
    ("upper", 16): ["ASIAKEY", "AKIAKEY", "ASIA0KEY=1", "--id=AKIAKEY"],
    ("hex", 40): ["KEY", "--key_of_wandb=KEY", "Logging.wandb_project = 'KEY'", "--wandb_key=KEY"],
    ("base62", 48): ["KEY", "--unknown=KEY", "https://hooks.host/a/b/KEY", "x = 'KEY'",
        "a, KEY; b"],
    ("base36", 56): ["KEY", "--unknown=KEY"],
}  # fmt: skip


@pytest.mark.parametrize(("alphabet", "length"), KEYS)
def test_keys_are_hidden_wherever_they_are(alphabet: str, length: int) -> None:
    draw, left, count = random.Random(length), 0, 0
    for _ in range(200):
        key = "".join(draw.choices(ALPHABETS[alphabet], k=length - 1)) + "7"
        for text in KEYS[alphabet, length]:
            found = redacted(text.replace("KEY", key))
            assert redacted(found) == found
            left, count = left + (key in found), count + 1
            assert key in found or lacks_secret(found)
    assert left <= 0.01 * count, "one in a hundred has no disorder to know it by"


# Texts that a run writes down and that contain no secret. HEX and a number stand for a hash of this
# length, WORD for a word, and NUM for a number.
HARMLESS = [
    "data/HEX64.bin", "sha256 HEX64", "HEX64", "commit HEX40", "--revision=HEX40",
    "git+https://h/r@HEX40",
    "/home/me/.cache/brt/HEX32/train/tokens.bin", "HEX32", "books/WORD-WORD_WORD.txt",
    "runs/HEX40/1",
    "--gin_bindings=Data.train = 'WORD/WORDNUM/*.jsonl.gz'", "Training.init_from = 'WORD_WORD_NUM'",
    "WORDWORDNUM-WORDNUM-WORD", "--seed=NUM", "Training.steps = NUM", "--WORD_tokens=NUM",
    "NUM.txt",
    "gate=WORD,learning_rate=0.NUM,window=NUM",
    "https://huggingface.co/WORD/WORD-NUM-WORD/tree/main",
    "--xla_WORD_WORD=true --xla_gpu_WORD=NUM", "WORD.WORD.NUM.tar.gz", "WORDNUMWORDNUMWORDNUM",
]  # fmt: skip
WORDS = """transformer Window recurrent Books Gutenberg slide LAYERS dropout large Small bert
    experiment baseline final tokens key model TPU warmup Summaries speech cosine""".split()


@pytest.mark.parametrize("template", HARMLESS)
def test_hashes_names_and_numbers_stay(template: str) -> None:
    draw = random.Random(template)

    def drawn(found: re.Match) -> str:
        if found[1]:
            return "".join(draw.choices("0123456789abcdef", k=int(found[1])))
        return draw.choice(WORDS) if found[0] == "WORD" else str(draw.randrange(10**7))

    for _ in range(300):
        text = re.sub(r"HEX(\d+)|WORD|NUM", drawn, template)
        assert redacted(text) == text and not lacks_secret(text)


def test_the_value_after_a_flag_is_hidden_too() -> None:
    said = ["train.py", "--wandb_key", "ab", "--hub_token", "-x", "--seed", "3", "--password", "4"]
    assert redacted(said) == [
        "train.py", "--wandb_key", "***", "--hub_token", "-x", "--seed", "3", "--password", "***",
    ]  # fmt: skip


def test_a_saved_config_has_no_secret_and_is_the_same_run() -> None:
    source = "https://me:pa55word@host/a.txt"
    config = Config(logging=Logging(mlflow_experiment=source, wandb_project="x"))
    saved = saved_json(config)
    assert "pa55word" not in json.dumps(saved) and saved["Logging"]["wandb_project"] == "x"
    assert difference(config_from_json(saved), config) == []
    other = Config(logging=Logging(mlflow_experiment=f"{source}b", wandb_project="x"))
    assert "pa55word" not in str(difference(config_from_json(saved), other))
    assert [name for name, *_ in difference(config_from_json(saved), other)] == [
        "Logging.mlflow_experiment"
    ]


def test_the_command_is_written_down_without_its_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    binding = "--gin_bindings=Data.train = 'https://me:pa55word@host/a.txt'"
    monkeypatch.setattr("sys.argv", ["train.py", binding])
    assert "pa55word" not in json.dumps(workdir.describe_process())
    assert "***@host/a.txt" in json.dumps(workdir.describe_process())


def test_the_flags_of_xla_are_written_down_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = "--xla_dump_to=gs://me:pa55word@bucket/a --xla_force_host_platform_device_count=8"
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert workdir.describe_process()["xla_flags"] == flags.replace("me:pa55word", "***")


def test_who_goes_on_without_the_secret_is_asked_for_it(tmp_path: Path) -> None:
    config = Config(logging=Logging(mlflow_experiment="https://me:pa55word@host/a"))
    workdir.write_json(workdir.Workdir(tmp_path).config_json, saved_json(config))
    with pytest.raises(
        ConfigError, match=r"^Logging.mlflow_experiment = .*@.* was saved without its secret"
    ):
        train.main(train.parser().parse_args([f"--workdir={tmp_path}"]))
