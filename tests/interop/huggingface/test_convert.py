"""Tests `python -m brt.convert` and the converted directory from which training can start."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from brt import convert as command
from brt import tasks
from brt.config import Attention, Config, CrossAttention, Training
from brt.errors import CheckpointError, ConfigError
from brt.interop import pretrained
from brt.interop.exporting import ExportSource
from brt.interop.huggingface import convert, files, verify
from brt.interop.huggingface.convert import load_converted
from brt.interop.pretrained import Pretrained
from brt.tasks.summarization.tokenization import PairTokenizer

pytestmark = pytest.mark.usefixtures("without_transformers")
SRFORMER = CrossAttention(kind="srformer", segment_size=4)


def assert_equal(actual: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.fixture
def source(tmp_path: Path, directory: Callable) -> Path:
    """Returns a directory with a T5 model and a tokenizer file."""
    shutil.copytree(directory("t5"), tmp_path / "t5")
    (tmp_path / "t5/spiece.model").write_bytes(b"pieces")
    return tmp_path / "t5"


def test_a_loaded_model_is_the_saved_one(source: Path, tmp_path: Path) -> None:
    list(convert.from_hf(source, tmp_path / "ours", verified=False))
    model, loaded = (pretrained.read(place)[0] for place in (source, tmp_path / "ours"))
    assert loaded.described == model.described
    assert_equal(loaded.params, model.params)


@pytest.mark.slow  # The quick tests here and in test_weights.py also convert models.
def test_the_recurrence_survives_both_ways(source: Path, tmp_path: Path) -> None:
    list(convert.from_hf(source, tmp_path / "full", verified=False))
    params = pretrained.load(tmp_path / "full", SRFORMER)
    described = pretrained.describe(tmp_path / "full")._replace(cross=SRFORMER)
    content = convert.to_format(Pretrained(params, described), {})
    lines = list(convert.to_hf(source, content, tmp_path / "theirs", verified=True))
    assert any("transformers will read the source by full attention" in line for line in lines)
    again, _, imported = pretrained.read(tmp_path / "theirs")
    assert again.described == described and imported.initialised == []
    assert_equal(again.params, params)


@pytest.mark.slow  # The quick tests here and in test_weights.py also convert models.
def test_bfloat16_is_rounding_and_float32_again(source: Path, tmp_path: Path) -> None:
    list(convert.from_hf(source, tmp_path / "ours", verified=False))
    target = tmp_path / "theirs"
    lines = list(
        convert.to_hf(
            source, load_converted(tmp_path / "ours"), target, verified=True, dtype="bfloat16"
        )
    )
    assert any("bfloat16" in line for line in lines)
    assert files.read_json(target / "config.json")["dtype"] == "bfloat16"
    again = pretrained.read(target)[0]
    assert {leaf.dtype for leaf in jax.tree.leaves(again.params)} == {np.dtype("float32")}
    lines = list(convert.from_hf(target, tmp_path / "again", verified=True))
    assert any("largest difference 0.0e+00" in line for line in lines)


def test_what_transformers_computes_otherwise_is_said(read: Callable, tmp_path: Path) -> None:
    tokenizer = PairTokenizer(
        name="x.model", fingerprint="x", content=b"", vocab_size=9, pad_id=0, eos_id=1,
        decoder_start_id=0, begin=(), encode_all=list, decode_ids=str,
    )  # fmt: skip
    for kind, said in (("full", []), ("clustered", ["trained with Attention.kind = 'clust"])):
        config = Config(
            training=Training(task="summarization"), seq2seq=read("bart")[0].described.model,
            attention=Attention(kind=kind, clusters=4),
        )  # fmt: skip
        exported = tasks.from_config(config).export(
            ExportSource(tmp_path, config, read("bart")[0].params, lambda: tokenizer)
        )
        assert [note[:36] for note in exported.notes] == said


def test_verification_finds_a_changed_array(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = files.write_file

    def damage(path: Path, tensors: dict) -> None:
        name = "decoder.block.1.layer.2.DenseReluDense.wo.weight"
        write(path, {**tensors, name: tensors[name] + np.float32(1e-6)})

    monkeypatch.setattr(files, "write_file", damage)
    with pytest.raises(CheckpointError, match=r"1 arrays changed .*wo.weight by 1\.\de-06"):
        list(convert.from_hf(source, tmp_path / "ours", verified=True))
    assert not (tmp_path / "ours").exists() and not (tmp_path / "ours.partial").exists()


def test_nothing_beside_the_target_is_touched(source: Path, tmp_path: Path) -> None:
    beside = tmp_path / "ours.partial"
    beside.mkdir()
    (beside / "thesis.tex").touch()
    list(convert.from_hf(source, tmp_path / "ours", verified=False))
    assert {"ours", "ours.partial"} <= {path.name for path in tmp_path.iterdir()}
    assert [path.name for path in beside.iterdir()] == ["thesis.tex"]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_disk_that_fails_is_one_sentence(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, content: dict) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(files, "write_json", fail)
    with pytest.raises(CheckpointError, match="ours cannot be written: Read-only file system"):
        list(convert.from_hf(source, tmp_path / "ours", verified=False))
    assert not (tmp_path / "ours").exists()


def test_logits_that_differ_are_an_error() -> None:
    logits = np.ones((2, 3, 4), np.float32)
    assert "1.0e-05" in verify.check_logits(logits + 1e-5, logits, "us")
    with pytest.raises(CheckpointError, match="against us: largest difference 1.0e-02"):
        verify.check_logits(logits + 1e-2, logits, "us")
    with pytest.raises(CheckpointError, match="nan"):
        verify.check_logits(logits * np.nan, logits, "us")


def test_a_target_that_holds_something_is_left_alone(source: Path) -> None:
    with pytest.raises(ConfigError, match="exists and is not empty"):
        list(convert.from_hf(source, source, verified=False))
    assert (source / "config.json").exists()


@pytest.mark.parametrize(
    ("flags", "error", "sentence"),
    [
        ("--from=hf {t5} --to=hf {out}", ConfigError, "--from and --to are both hf"),
        ("--from=hf {t5}/none --to=brt {out}", ConfigError, "is not a directory; name a dir"),
        ("--from=brt {t5}/none --to=hf {out}", ConfigError, "is not a directory; name the dir"),
        ("--from=hf {t5} --to=brt {out} --dtype=bfloat16", ConfigError, "--dtype is for --to=hf"),
        ("--from=brt {here} --to=hf {out}", CheckpointError, "has no config.json with a model_t"),
    ],
    ids=range(5),
)
def test_what_cannot_be_converted_is_refused(
    source: Path, tmp_path: Path, flags: str, error: type[Exception], sentence: str
) -> None:
    (tmp_path / "empty").mkdir()
    words = flags.format(t5=source, here=tmp_path / "empty", out=tmp_path / "out").split()
    with pytest.raises(error, match=sentence):
        command.main(command.parser().parse_args(words))
    assert not (tmp_path / "out").exists()
