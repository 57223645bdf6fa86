"""Tests commands and the Python API on a pretrained decoder in Hugging Face's format."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_decoder import MODEL, TEXT

import brt
from brt import convert, evaluate, generate, train
from brt.config import Sampling
from brt.config.model import Window
from brt.errors import CheckpointError, ConfigError
from brt.interop.huggingface import files
from brt.interop.huggingface.causal import reading
from brt.interop.huggingface.causal.config import WindowChoice
from brt.models.decoder import forward_flops_per_token


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("books") / "book.txt"
    path.write_text(TEXT)
    return path


def run(command: Any, *flags: str) -> None:
    command.main(command.parser().parse_args(flags))


@pytest.mark.slow
def test_the_directory_is_read_as_it_is(base: Path) -> None:
    model = brt.load(base, bindings={"Model.window": 32, "Window.sinks": 2})
    assert (model.step, model.config.model.window, model.config.model.sliding.sinks) == (0, 32, 2)
    assert model.config.model.end_ids == (2,) and model.tokenizer.vocab_size == 280
    assert model.bits_per_byte(TEXT[:500]) > 1
    assert np.isfinite(model.token_bits(np.array([3, 299]))).all()  # The model has 300 ids.
    with pytest.raises(ConfigError, match="evaluations are stored in run directories"):
        model.evaluate()
    with pytest.raises(CheckpointError, match="has no steps"):
        brt.load(base, step=5)
    with pytest.raises(CheckpointError, match="k_proj"):
        brt.load(base, bindings={"SelfAttention.kv_heads": 4})
    assert {path.name for path in base.iterdir()} == {
        "config.json", "tokenizer.json", files.INDEX, *files.shards(base / files.INDEX),
    }  # fmt: skip


def test_commands_say_how_to_make_it_a_run(base: Path) -> None:
    with pytest.raises(ConfigError, match=r"is a model in Hugging Face's format; make it a run"):
        run(generate, f"--workdir={base}", "--prompt=It")


def test_a_run_is_made_evaluated_and_given_back(base: Path, book: Path, tmp_path: Path) -> None:
    ours, back = tmp_path / "ours", tmp_path / "back"
    to_ours = ("--from=hf", str(base), "--to=brt", str(ours), "--window=32", "--sinks=4")
    run(convert, *to_ours, "--verify")
    of_text = ("--gin.Data.score_ends='no'",)  # as `bits_per_byte` does
    run(evaluate, f"--workdir={ours}", f"--gin.Data.test={str(book)!r}", *of_text)
    found = json.loads((ours / "evaluations/0/test.json").read_text())
    direct = brt.load(base, bindings={"Model.window": 32, "Window.sinks": 4})
    assert found["bits_per_byte"] == pytest.approx(direct.bits_per_byte(TEXT), rel=1e-5)
    run(convert, "--from=brt", str(ours), "--to=hf", str(back), "--verify", "--plain")
    for name, array in files.read_tensors(base).items():
        np.testing.assert_array_equal(files.read_tensors(back)[name], array)
    described = json.loads((back / "config.json").read_text())
    assert described["eos_token_id"] == [2]
    assert json.loads((back / "generation_config.json").read_text())["eos_token_id"] == [2]
    assert reading.describe(back, WindowChoice(32, 4)).model == dataclasses.replace(
        MODEL,
        window=32,
        sliding=Window(block=32, sinks=4),
        dtype=direct.config.model.dtype,
    )


@pytest.mark.slow
def test_training_goes_on_from_the_directory(base: Path, book: Path, tmp_path: Path) -> None:
    settings = {
        "Training.init_from": str(base), "Data.train": str(book), "Data.validation": (),
        "Data.test": (), "Model.window": 16, "Window.block": 16, "Training.segment_length": 32,
        "Training.batch_size": 2, "Training.steps": 2, "Training.sample_every": 0,
        "Optimizer.learning_rate": 1e-9, "Optimizer.warmup_steps": 0,
    }  # fmt: skip
    config = brt.config_from_gin((), settings)
    model = brt.train(config, tmp_path / "run")
    assert model.config.model.attention.kv_heads == 2 and model.config.model.sliding.sinks == 4
    untrained = brt.load(base, bindings={"Model.window": 16, "Window.sinks": 4})
    bits = untrained.bits_per_byte(TEXT[:400])
    assert model.bits_per_byte(TEXT[:400]) == pytest.approx(bits, rel=1e-3)
    assert forward_flops_per_token(model.config.model) > 0
    settings["Training.steps"] = 3
    again = [f"--gin_bindings={name} = {value!r}" for name, value in settings.items()]
    run(train, f"--workdir={tmp_path / 'run'}", *again)
    assert brt.load(tmp_path / "run").step == 3


@pytest.mark.slow
def test_adapters_are_merged_when_the_model_is_given_back(
    base: Path, book: Path, tmp_path: Path
) -> None:
    settings = {
        "Training.init_from": str(base), "Data.train": str(book), "Data.validation": (),
        "Data.test": (), "Model.window": 16, "Window.block": 16, "Training.segment_length": 32,
        "Training.batch_size": 2, "Training.steps": 3, "Training.sample_every": 0,
        "Optimizer.name": "adamw", "Optimizer.learning_rate": 0.01, "Optimizer.warmup_steps": 0,
        "Adapter.rank": 2, "Adapter.kernels": ("*/queries", "*/output", "*/mlp_in"),
        "Training.trainable": ("*/tokens/norm", "norm"),
    }  # fmt: skip
    model = brt.train(brt.config_from_gin((), settings), tmp_path / "run")
    back = tmp_path / "back"
    run(convert, "--from=brt", str(tmp_path / "run"), "--to=hf", str(back), "--verify", "--plain")
    before, after = files.read_tensors(base), files.read_tensors(back)
    assert before.keys() == after.keys()
    kinds = {
        name.split(".")[-2] for name in before if np.any(np.asarray(before[name] != after[name]))
    }
    assert {"q_proj", "o_proj"} <= kinds and not kinds & {"k_proj", "v_proj", "embed_tokens"}
    unchanged = [name for name in before if "post_attention_layernorm" in name]
    assert all(np.array_equal(before[name], after[name]) for name in unchanged)
    exported = brt.load(back, bindings={"Model.window": 16, "Window.sinks": 4})
    loaded = brt.load(tmp_path / "run").bits_per_byte(TEXT[:400])
    assert exported.bits_per_byte(TEXT[:400]) == pytest.approx(loaded, rel=1e-5)
    assert model.bits_per_byte(TEXT[:400]) == pytest.approx(loaded, rel=1e-5)
    adapter = tmp_path / "adapter"
    run(convert, "--from=brt", str(tmp_path / "run"), "--to=hf", str(adapter), "--adapter")
    added = brt.load(adapter, bindings={"Model.window": 16, "Window.sinks": 4})
    assert added.bits_per_byte(TEXT[:400]) == pytest.approx(loaded, rel=1e-5)
    original = brt.load(base, bindings={"Model.window": 16, "Window.sinks": 4})
    assert abs(original.bits_per_byte(TEXT[:400]) - loaded) > 1e-4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"eos_token_id": 300}, "eos_token_id = 300 is none of the 300 ids"),
        ({"eos_token_id": [2, "x"]}, "eos_token_id = 'x' is none of the 300 ids"),
        ({"vocab_size": 270}, "has 280 ids, but config.json says vocab_size = 270"),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused(
    base: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    described = json.loads((base / "config.json").read_text()) | change
    if "vocab_size" in change:
        described["eos_token_id"] = None
    files.write_json(tmp_path / "config.json", described)
    (tmp_path / "tokenizer.json").write_bytes((base / "tokenizer.json").read_bytes())
    with pytest.raises(CheckpointError, match=message):
        reading.describe(tmp_path)


@pytest.mark.slow
def test_a_window_beyond_the_context_is_read_and_said(
    base: Path, book: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    ours = tmp_path / "ours"
    run(convert, "--from=hf", str(base), "--to=brt", str(ours), "--window=64", "--sinks=4")
    said = "tokens see 64 tokens and 4 sinks, more than the context of 64 tokens"
    assert f"note: {said}" in capsys.readouterr().out
    run(generate, f"--workdir={ours}", "--prompt=It was", "--max_tokens=8")
    assert "It was" in capsys.readouterr().out
    run(evaluate, f"--workdir={ours}", f"--gin.Data.test={str(book)!r}", "--windows=16,32,64")
    assert capsys.readouterr().err.count(f"warning: {said}") == 1


def test_settings_of_generation_are_taken(base: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((base / name).read_bytes())
    described = {"do_sample": True, "temperature": 1, "top_k": 20, "eos_token_id": [2, 0]}
    files.write_json(tmp_path / "generation_config.json", described)
    assert reading.describe(tmp_path).sampling == Sampling(temperature=1.0, top_k=20)
    described["temperature"] = 0.6
    files.write_json(tmp_path / "generation_config.json", described)
    decoder = reading.describe(tmp_path)
    assert decoder.sampling == Sampling(temperature=0.6, top_k=20)
    assert decoder.model.end_ids == (2, 0)
    files.write_json(tmp_path / "generation_config.json", {**described, "do_sample": False})
    assert reading.describe(tmp_path).sampling == Sampling()
    files.write_json(tmp_path / "generation_config.json", {**described, "top_k": "many"})
    with pytest.raises(CheckpointError, match="generation_config.json: top_k"):
        reading.describe(tmp_path)
