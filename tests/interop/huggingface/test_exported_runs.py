"""Tests the export of encoder runs as checkpoints of RoBERTa."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt import tasks
from brt.checkpointing.writer import CheckpointWriter
from brt.config import Attention, Config, Data, Encoder, Training
from brt.config_io import config_json
from brt.data.tokenizers import ByteTokenizer
from brt.errors import CheckpointError
from brt.interop import pretrained
from brt.interop.huggingface import convert, files
from brt.models import encoder
from brt.training import conversion, saved_model
from brt.training import workdir as workdirs

TYPES = "roberta.embeddings.token_type_embeddings.weight"
SIZES = Encoder(
    layers=1, model_dim=12, heads=3, mlp_dim=10, max_positions=30, vocab_size=257,
    norm_first=False, dtype="bfloat16", remat=True,
)  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Path]:
    """Returns a function that writes the directory of a run with a checkpoint of random weights."""
    for split in ("train", "validation"):
        (tmp_path / f"{split}.txt").write_text(f"the text of {split}")
    data = Data(train=(f"{tmp_path}/train.txt",), validation=(f"{tmp_path}/validation.txt",),
                test=(), validation_fraction=0.0, test_fraction=0.0)  # fmt: skip

    def write(
        objective: Any = "masked_language_modeling",
        attention: Attention | None = None,
        **settings: Any,
    ) -> Path:
        model = dataclasses.replace(SIZES, **settings)
        training = Training(task=objective, segment_length=16)
        config = Config(
            training=training, encoder=model, attention=attention or Attention(), data=data
        )
        rng = np.random.default_rng(0)
        network = encoder.EncoderWithHead(model, task=tasks.by_name(objective).head)
        shapes = jax.eval_shape(lambda: nn.meta.unbox(encoder.init(network, jax.random.key(0))))
        params = jax.tree.map(
            lambda x: jnp.asarray(0.3 * rng.normal(size=x.shape), x.dtype), shapes
        )
        workdir = workdirs.create(tmp_path / "run")
        name, content = ByteTokenizer.file
        (workdir.tokenizer / name).write_bytes(content)
        with CheckpointWriter(workdir.checkpoints) as writer:
            meta = {"config": config_json(config), "tokenizer": ByteTokenizer.fingerprint}
            writer.save(1, {"params": params}, meta)
        return tmp_path / "run"

    return write


def write(workdir: Path, target: Path, verified: bool = False) -> list[str]:
    """Exports a run, and returns what is said."""
    return list(convert.to_hf(workdir, conversion.export(workdir), target, verified=verified))


@pytest.mark.slow  # The quick tests in test_convert.py and test_weights.py also convert models.
def test_a_run_becomes_a_checkpoint_of_roberta(
    run: Callable, tmp_path: Path, without_transformers: None
) -> None:
    workdir = run(attention=Attention(kind="improved_clustered", clusters=4, top_k=4))
    lines = write(workdir, tmp_path / "theirs", verified=True)
    text = "\n".join(lines)
    assert "roberta for masked_language_modeling, 1 layers, width 12, 30 positions" in text
    assert "tokenizer: no files" in lines
    assert "trained with Attention.kind = 'improved_clustered'; transformers will read by f" in text
    assert "the mask is token 256\n" in text and "takes token 1 for padding\n" in text
    assert "logits against the model before it was written: largest difference" in text

    settings = files.read_json(tmp_path / "theirs/config.json")
    assert settings["architectures"] == ["RobertaForMaskedLM"]
    assert (settings["vocab_size"], settings["max_position_embeddings"]) == (257, 32)
    again, arrays, imported = pretrained.read(tmp_path / "theirs")
    assert imported.initialised == imported.unexpected == []
    np.testing.assert_array_equal(arrays[TYPES], np.zeros((1, 12)))
    for name, array in conversion.export(workdir).arrays.items():
        np.testing.assert_array_equal(arrays[name], array)
    assert again.described.model == dataclasses.replace(
        SIZES, token_types=1, attention_dropout=0.1, dtype="auto", remat=False
    )


@pytest.mark.slow_cases("settings[12]-*")
@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"positions": "sinusoidal"}, "Model.positions = 'sinusoidal' has no counterpart in Ro"),
        ({"norm_first": True}, "Encoder.norm_first = True has no counterpart in RoBERTa"),
        (
            {"objective": "speech_recognition", "features": 4, "vocab_size": 5},
            "Encoder.features = 4 has no counterpart in RoBERTa",
        ),
    ],
)
def test_what_roberta_lacks_is_refused_and_nothing_is_written(
    run: Callable, tmp_path: Path, settings: dict, sentence: str
) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        write(run(**settings), tmp_path / "theirs")
    assert not (tmp_path / "theirs").exists()


def test_a_sentencepiece_model_comes_along(
    run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = SimpleNamespace(name="my.model", file=("tokenizer.model", b"pieces"), beside={})
    monkeypatch.setattr(saved_model, "tokenizer", lambda model: kept)
    lines = write(run(), tmp_path / "theirs")
    assert "tokenizer: tokenizer.model" in lines
    assert (tmp_path / "theirs/tokenizer.model").read_bytes() == b"pieces"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Torch and transformers themselves cause warnings.
def test_transformers_computes_the_same(run: Callable, tmp_path: Path) -> None:
    """The test needs torch and transformers and is skipped without them."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    lines = write(run(), tmp_path / "theirs", verified=True)
    assert any(line.startswith("logits against transformers: largest") for line in lines)
