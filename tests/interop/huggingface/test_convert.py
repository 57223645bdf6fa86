"""Tests `python -m brt.convert` and the converted directory from which training can start."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from brt import tasks
from brt.config import Attention, Config, CrossAttention, Training
from brt.errors import CheckpointError, ConfigError
from brt.interop import pretrained
from brt.interop.exporting import ExportSource
from brt.interop.huggingface import convert, files, verify
from brt.interop.huggingface.convert import load_converted
from brt.tasks.summarization.tokenization import PairTokenizer

SRFORMER = CrossAttention(kind="srformer", segment_size=4)


def assert_equal(actual: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def no_transformers(*_: Any) -> None:
    """Replaces `transformers_logits`, so that results do not depend on installed packages."""


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "transformers_logits", no_transformers)


@pytest.fixture
def source(tmp_path: Path, directory: Callable) -> Path:
    """Returns a directory with a T5 model and a tokenizer file."""
    shutil.copytree(directory("t5"), tmp_path / "t5")
    (tmp_path / "t5/spiece.model").write_bytes(b"pieces")
    return tmp_path / "t5"


@pytest.mark.slow
def test_there_and_back_is_the_same_checkpoint(source: Path, tmp_path: Path) -> None:
    there = list(convert.from_hf(source, tmp_path / "ours", verified=True))
    back = list(
        convert.to_hf(load_converted(tmp_path / "ours"), tmp_path / "theirs", verified=True)
    )
    for lines in (there, back):
        assert "tokenizer: spiece.model" in lines
        assert any("largest difference 0.0e+00" in line for line in lines)
        assert any("arrays are bit-equal" in line for line in lines)
    assert_equal(files.read_tensors(tmp_path / "theirs"), files.read_tensors(source))
    assert (tmp_path / "theirs/spiece.model").read_bytes() == b"pieces"
    first, again = convert.read(source)[0], convert.read(tmp_path / "theirs")[0]
    assert again.described == first.described
    assert first.described.tasks["summarization"]["num_beams"] == 4
    assert {path.name for path in tmp_path.iterdir()} == {"t5", "ours", "theirs"}


def test_a_loaded_model_is_the_saved_one(source: Path, tmp_path: Path) -> None:
    list(convert.from_hf(source, tmp_path / "ours", verified=False))
    model = convert.read(source)[0]
    loaded = pretrained.load(tmp_path / "ours")
    assert loaded.described == model.described
    assert_equal(loaded.params, model.params)


@pytest.mark.slow  # The quick tests here and in test_weights.py also convert models.
def test_the_recurrence_survives_both_ways(source: Path, tmp_path: Path) -> None:
    list(convert.from_hf(source, tmp_path / "full", verified=False))
    model = pretrained.load(tmp_path / "full", SRFORMER)
    assert model.described.cross == SRFORMER
    (tmp_path / "ours").mkdir()
    pretrained.save(tmp_path / "ours", model)
    lines = list(
        convert.to_hf(load_converted(tmp_path / "ours"), tmp_path / "theirs", verified=True)
    )
    assert any("transformers will read the source by full attention" in line for line in lines)
    again, _, imported = convert.read(tmp_path / "theirs")
    assert again.described == model.described and imported.initialised == []
    assert_equal(again.params, model.params)


@pytest.mark.slow  # The quick tests here and in test_weights.py also convert models.
def test_bfloat16_is_rounding_and_float32_again(source: Path, tmp_path: Path) -> None:
    list(convert.from_hf(source, tmp_path / "ours", verified=False))
    target = tmp_path / "theirs"
    lines = list(
        convert.to_hf(load_converted(tmp_path / "ours"), target, verified=True, dtype="bfloat16")
    )
    assert any("bfloat16" in line for line in lines)
    assert files.read_json(target / "config.json")["dtype"] == "bfloat16"
    again = convert.read(target)[0]
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
            training=Training(task="summarization"),
            attention=Attention(kind=kind, clusters=4),
        )
        exported = tasks.from_config(config).export(
            ExportSource(tmp_path, config, read("bart")[0].params, lambda: tokenizer)
        )
        assert [note[:36] for note in exported.notes] == said


def test_verification_finds_a_changed_array(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = files.write_file

    def damage(path: Path, tensors: dict) -> None:
        name = "decoder/layers_0/mlp/wo/kernel"
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


@pytest.mark.parametrize(
    ("file", "change", "sentence"),
    [
        ("model.json", {"format": 2}, "has format 2; this version of brt reads 1"),
        ("generation.json", {"special_tokens": {"pad": 0}}, "is not of brt"),
    ],
)
def test_damaged_directories_are_refused(
    source: Path, tmp_path: Path, file: str, change: dict, sentence: str
) -> None:
    list(convert.from_hf(source, tmp_path / "ours", verified=False))
    content = files.read_json(tmp_path / "ours" / file) | change
    (tmp_path / "ours" / file).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=sentence):
        pretrained.load(tmp_path / "ours")


def test_parameters_of_another_model_are_refused(source: Path, tmp_path: Path) -> None:
    list(convert.from_hf(source, tmp_path / "ours", verified=False))
    content = files.read_json(tmp_path / "ours/model.json")
    content["Seq2Seq"]["mlp_dim"] = 32
    (tmp_path / "ours/model.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"mlp/wi/kernel is \(16, 24\), but \(16, 32\) by"):
        pretrained.load(tmp_path / "ours")
    with pytest.raises(CheckpointError, match="has no model.json; python -m brt.convert"):
        pretrained.load(source)


def test_a_target_that_holds_something_is_left_alone(source: Path) -> None:
    with pytest.raises(ConfigError, match="exists and is not empty"):
        list(convert.from_hf(source, source, verified=False))
    assert (source / "config.json").exists()


@pytest.mark.slow_cases("flags[04]*", "flags[23]*", "flags5*")
@pytest.mark.parametrize(
    ("flags", "code", "sentence"),
    [
        (["--from=hf", "{t5}", "--to=brt", "{out}", "--verify"], 0, "wrote"),
        (["--from=hf", "{t5}", "--to=hf", "{out}"], 2, "--from and --to are both hf"),
        (["--from=hf", "{t5}/none", "--to=brt", "{out}"], 2, "is not a directory; download"),
        (
            ["--from=brt", "{t5}/none", "--to=hf", "{out}"],
            2,
            "is not a directory; name the directory",
        ),
        (
            ["--from=hf", "{t5}", "--to=brt", "{out}", "--dtype=bfloat16"],
            2,
            "--dtype is for --to=hf",
        ),
        (["--from=brt", "{t5}", "--to=hf", "{out}"], 4, "has no model.json"),
    ],
)
def test_brt_convert_ends_with_its_exit_code_and_sentence(
    source: Path, tmp_path: Path, flags: list[str], code: int, sentence: str
) -> None:
    flags = [flag.format(t5=source, out=tmp_path / "out") for flag in flags]
    done = subprocess.run(
        [sys.executable, "-m", "brt.convert", *flags], capture_output=True, text=True
    )
    assert done.returncode == code, done.stderr
    assert sentence in (done.stderr if code else done.stdout)
    assert (tmp_path / "out").exists() == (code == 0)


@pytest.mark.slow  # The quick tests here and in test_weights.py also convert models.
def test_positions_are_extended_on_the_way_in(directory: Callable, tmp_path: Path) -> None:
    lines = list(convert.from_hf(directory("bart"), tmp_path / "long", verified=True, positions=50))
    assert "extended to 50 positions (copy)" in lines
    long = pretrained.load(tmp_path / "long")
    assert long.described.model.max_positions == 50
    short, table = (
        np.asarray(m.params["encoder"]["pos_embed"])
        for m in (convert.read(directory("bart"))[0], long)
    )
    offset = 2
    assert table.shape[0] == 50 + offset
    np.testing.assert_array_equal(table[: short.shape[0]], short)
    np.testing.assert_array_equal(table[short.shape[0] :], short[offset : 50 - 32 + offset])
