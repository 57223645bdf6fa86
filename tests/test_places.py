"""Tests what users may write where they name a file or a directory: in flags, settings and Python.

The lists of this file name what is no file. A new flag or setting is in them, or passes the tests.
"""

import argparse
import dataclasses
import importlib
import typing
from collections.abc import Iterator
from pathlib import Path

import buckets
import pytest
from buckets import BucketServer
from import_rules import COMMANDS

import brt
from brt import command_line, storage
from brt.config import Config
from brt.config.fields import settings
from brt.config.names import field_types, section_types
from brt.errors import ConfigError
from brt.storage import places
from brt.tasks.summarization import raw

server = buckets.bucket_server  # the fixture
# Names of no place that brt reads, and what an error says of them.
REFUSED = {
    "s3://key:word@bucket/a*.txt": "no name of a bucket", "hf://OWNER/NAME": "is a URL",
    "http://host/a": "is a URL", "X-y.z+1://a": "is a URL", "gs:/bucket/../run": "as one",
    "gs:bucket/run": "lacks the slashes", "file://host/a": "no file of this machine",
}  # fmt: skip
IN_BUCKET = "gs://bucket/a/run"
# These flags take texts that are no files.
TEXTS = {
    "--gin_bindings", "--prompt", "--stop", "--windows", "--topology", "--allow_config_change",
    "--coordinator_address", "--slurm", "--name", "--columns", "--source_field",
    "--target_field", "--id_field", "--system",
}  # fmt: skip
# These settings have texts that are no files.
TEXT_SETTINGS = {
    "Adapter.kernels", "CrossAttention.without", "Data.columns",
    "Kernels.use", "Logging.mlflow_experiment", "Logging.wandb_project", "Pairs.prefix",
    "Sentences.header", "Sentences.labels", "Training.init_keep", "Training.task",
    "Training.trainable",
}  # fmt: skip


def flags() -> Iterator[tuple[str, argparse.Action]]:
    """Yields the command and the action of each flag whose value is a text of the user's choice."""
    for command in sorted(COMMANDS):
        for action in importlib.import_module(f"brt.{command}").parser()._actions:
            if action.nargs != 0 and not action.choices and action.type not in (int, float):
                yield command, action


def name_of(action: argparse.Action) -> str:
    return (action.option_strings or [action.metavar])[0]


FILES = [pytest.param(a, id=c + name_of(a)) for c, a in flags() if name_of(a) not in TEXTS]


@pytest.mark.parametrize("action", FILES)
def test_every_flag_of_a_file_expands_the_home_and_takes_places_in_buckets(
    action: argparse.Action, monkeypatch: pytest.MonkeyPatch, server: BucketServer
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert action.type is not None, f"{name_of(action)} has not the type command_line.path"
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser._add_action(action)
    before = [] if not action.option_strings else [action.option_strings[0]]
    found = vars(parser.parse_args([*before, "~/a"]))[action.dest]
    assert "/home/me/a" in (found, *found)
    for url, why in REFUSED.items():
        if action.type is command_line.source and url.startswith("hf:"):
            continue
        with pytest.raises(argparse.ArgumentError, match=f"{name_of(action)}: .*{why}"):
            parser.parse_args([*before, url])
    found = vars(parser.parse_args([*before, IN_BUCKET]))[action.dest]
    values = [found] if isinstance(found, str) else found
    assert [storage.shown(value) for value in values] == [IN_BUCKET]
    storage.discard_all()


def test_every_text_that_is_set_is_a_file_or_known_to_be_none() -> None:
    for name, kind in field_types().items():
        texts = kind is str or (typing.get_origin(kind) is tuple and str in typing.get_args(kind))
        if texts and name not in TEXT_SETTINGS:
            section, field = name.split(".")
            assert settings(section_types()[section])[field].path, f"{name} declares no path"


def paths() -> Iterator[tuple[type, str]]:
    """Yields the section and the field of each setting that names files."""
    for field in dataclasses.fields(Config):
        section = type(getattr(Config(), field.name))
        if dataclasses.is_dataclass(section):
            yield from ((section, name) for name, s in settings(section).items() if s.path)


@pytest.mark.parametrize(("section", "field"), [*paths()])
def test_every_setting_of_a_file_expands_the_home_and_takes_places_in_buckets(
    section: type, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    many = isinstance(getattr(section(), field), tuple)
    made = section(**{field: ("~/a.json", "tfds:a/b") if many else "~/a.json"})
    found = getattr(made, field)
    assert found == (("/home/me/a.json", "tfds:a/b") if many else "/home/me/a.json")
    for url, why in REFUSED.items():
        if settings(section)[field].path == "data" and url.startswith("hf:"):
            continue
        with pytest.raises(ConfigError, match=rf"\.{field}: .*{why}") as caught:
            section(**{field: (url,) if many else url})
        assert "word" not in str(caught.value), "a password is shown"
    if settings(section)[field].path == "written":
        with pytest.raises(ConfigError, match=rf"\.{field}: .* must be a local path"):
            section(**{field: IN_BUCKET})
    else:
        found = getattr(section(**{field: (IN_BUCKET,) if many else IN_BUCKET}), field)
        assert found == ((IN_BUCKET,) if many else IN_BUCKET)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("~/a", "/home/me/a"), ("~", "/home/me"), ("./~/a", "./~/a"), ("a/~", "a/~"), ("", ""),
        ("~no_such_user/a", "~no_such_user/a"), ("~\0/a", "~\0/a"), ("./gs:/a", "./gs:/a"),
        ("corpus:novels/train", "corpus:novels/train"), ("tfds:a/b:1.0/c", "tfds:a/b:1.0/c"),
        ("memory:copy/train/9?distance=96", "memory:copy/train/9?distance=96"), ("-", "-"),
        ("a.tsv:train", "a.tsv:train"), (Path("b/c"), "b/c"),
    ],
)  # fmt: skip
def test_local_names(name: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert places.parse(name) == path


def test_no_directory_is_called_like_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.path.expanduser", lambda name: name)
    with pytest.raises(ConfigError, match="home directory"):
        places.parse("~/a")


@pytest.mark.parametrize("url", ["hf://OWNER/NAME", Path("hf://OWNER/NAME")])
def test_python_refuses_urls_before_anything_is_written(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for call in (lambda: brt.load(url), lambda: brt.train(Config(), url)):
        with pytest.raises(ConfigError, match="'hf:.* is a URL"):
            call()
    with pytest.raises(ConfigError, match="is a URL"):
        brt.config_from_gin(url)
    monkeypatch.setattr("tensorflow_datasets.core.constants.DATA_DIR", "gs://bucket")
    with pytest.raises(ConfigError, match="TFDS_DATA_DIR: "):
        raw.default_directory()
    (tmp_path / "a.gin").write_text("include 'hf://bucket/b.gin'\n")
    with pytest.raises(ConfigError, match="is a URL"):
        brt.config_from_gin("a.gin")
    assert [path.name for path in tmp_path.iterdir()] == ["a.gin"]
