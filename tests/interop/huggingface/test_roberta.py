"""Tests that converted RoBERTa checkpoints compute the outputs of transformers 5.23.0, which
tests/data/huggingface contains.
"""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recordings import arrays

from brt import tasks
from brt.config import Attention, Config, Training
from brt.errors import CheckpointError
from brt.interop import pretrained
from brt.interop.huggingface import convert, files
from brt.interop.huggingface.convert import load_converted
from brt.interop.huggingface.roberta import EncoderWithHead
from brt.models import encoder, seq2seq

TASKS = {
    "roberta": "masked_language_modeling",
    "roberta_classification": "classification",
    "roberta_spans": "spans",
}
TOLERANCE = 5e-6  # of float32 outputs, relative to the largest magnitude

pytestmark = pytest.mark.usefixtures("without_transformers")
each_model = pytest.mark.parametrize("model", TASKS)


@pytest.fixture
def source(tmp_path: Path, directory: Callable) -> Path:
    """Returns a directory with the masked language model and tokenizer files."""
    shutil.copytree(directory("roberta"), tmp_path / "theirs")
    (tmp_path / "theirs/vocab.json").write_bytes(b"{}")
    (tmp_path / "theirs/merges.txt").write_bytes(b"m")
    return tmp_path / "theirs"


@functools.cache
def loaded(directory: Path) -> tuple[Any, dict[str, np.ndarray]]:
    """Returns the converted parameters with their description, and the recorded arrays."""
    return pretrained.read(directory)[0], arrays(directory / "expected.npz")


@functools.cache
def computed(directory: Path, attention: Attention) -> tuple[np.ndarray, np.ndarray]:
    """Returns hidden vectors and logits for the recorded inputs."""
    (params, described), x = loaded(directory)
    arrays = [jnp.asarray(x[name]) for name in ("tokens", "mask", "types")]

    @jax.jit
    def run(params: Any, tokens: Any, mask: Any, types: Any) -> tuple[jax.Array, jax.Array]:
        of_head = encoder.EncoderWithHead(described.model, attention, described.task)
        key = jax.random.key(0)
        hidden = of_head.apply(
            {"params": params}, tokens, mask, key, types,
            method=lambda network, *inputs: network.encoder(*inputs),
        )  # fmt: skip
        y = of_head.apply({"params": params}, tokens, mask, key, types)
        if described.task == "masked_language_modeling":
            y = seq2seq.logits(encoder.readout(params), y)
        return hidden, y

    return tuple(map(np.asarray, run(params, *arrays)))


@pytest.mark.slow_cases("roberta_*")
@each_model
def test_hidden_vectors_and_logits(directory: Callable, model: str) -> None:
    (_, described), x = loaded(directory(model))
    assert described.task == TASKS[model]
    hidden, logits = computed(directory(model), Attention())
    there = x["mask"][..., None]
    for found, expected in ((hidden, x["hidden"]), (logits, x["logits"])):
        where = there if found.ndim == 3 else True
        difference = np.abs(np.where(where, found - expected, 0)).max()
        assert difference <= TOLERANCE * np.abs(expected).max(), f"{difference:.1e}"


@pytest.mark.slow  # The quick tests in test_convert.py and test_weights.py also convert models.
def test_a_loaded_model_reads_with_clusters(directory: Callable) -> None:
    """Clustered attention is exact if top_k covers all keys, and close with 25 clusters."""
    x = loaded(directory("roberta"))[1]
    exact, there = computed(directory("roberta"), Attention())[1], x["mask"]
    logits = {}
    for name, attention in (
        ("all keys", Attention(kind="improved_clustered", clusters=2, top_k=20)),
        ("near", Attention(kind="improved_clustered", clusters=25, top_k=12)),
    ):
        logits[name] = computed(directory("roberta"), attention)[1][there] - exact[there]
    size = np.abs(exact[there]).max()
    assert np.abs(logits["all keys"]).max() < 1e-5 * size
    assert 0 < np.sqrt(np.mean(logits["near"] ** 2)) < 0.05 * exact[there].std()


@pytest.mark.slow  # The quick tests in test_convert.py and test_weights.py also convert models.
def test_one_class_is_a_number(directory: Callable, tmp_path: Path) -> None:
    """A checkpoint with a single label is read and written as a regression model."""
    theirs = tmp_path / "theirs"
    shutil.copytree(directory("roberta_classification"), theirs)
    settings = files.read_json(theirs / "config.json")
    settings |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    files.write_json(theirs / "config.json", settings)
    arrays = files.read_file(theirs / "model.safetensors")
    for name in ("classifier.out_proj.weight", "classifier.out_proj.bias"):
        arrays[name] = arrays[name][:1].copy()
    files.write_file(theirs / "model.safetensors", arrays)
    found = pretrained.read(theirs)[0]
    assert (found.described.task, found.described.model.classes) == ("regression", 1)
    list(convert.from_hf(theirs, tmp_path / "ours", verified=True))
    list(
        convert.to_hf(
            tmp_path, load_converted(tmp_path / "ours"), tmp_path / "again", verified=True
        )
    )
    again = files.read_json(tmp_path / "again/config.json")
    assert again["architectures"] == ["RobertaForSequenceClassification"]
    assert again["id2label"] == {"0": "LABEL_0"}


@pytest.mark.slow_cases("roberta", "t5", "roberta_*")
@pytest.mark.parametrize("model", ["t5", *TASKS])
def test_there_and_back_is_the_same_checkpoint(
    directory: Callable, tmp_path: Path, model: str
) -> None:
    there = list(convert.from_hf(directory(model), tmp_path / "ours", verified=True))
    back = list(
        convert.to_hf(
            tmp_path, load_converted(tmp_path / "ours"), tmp_path / "again", verified=True
        )
    )
    for lines in (there, back):
        assert any("logits against the model before it was written: largest difference 0.0e+00"
                   in line for line in lines)  # fmt: skip
        assert any("arrays are bit-equal" in line for line in lines)
    before, after = (files.read_tensors(d) for d in (directory(model), tmp_path / "again"))
    jax.tree.map(np.testing.assert_array_equal, after, before)
    old, new = (files.read_json(d / "config.json") for d in (directory(model), tmp_path / "again"))
    assert {name: old[name] for name in new if name in old}.items() <= new.items()
    assert new["architectures"] == old["architectures"]


def test_the_tokenizer_comes_along_and_positions_can_be_extended(
    source: Path, tmp_path: Path
) -> None:
    lines = list(convert.from_hf(source, tmp_path / "ours", verified=False, positions=50))
    assert "tokenizer: vocab.json, merges.txt" in lines
    assert "note: extended to 50 positions (copy)" in lines
    short, long = pretrained.read(source)[0], pretrained.read(tmp_path / "ours")[0]
    assert long.described.model.max_positions == 50
    tables = [m.params["encoder"]["inputs"]["pos_embed"] for m in (short, long)]
    np.testing.assert_array_equal(tables[1], np.concatenate([tables[0], tables[0][2:20]]))
    config = Config(training=Training(task="summarization"))
    with pytest.raises(CheckpointError, match="holds an encoder alone, which writes no summaries"):
        tasks.from_config(config).load_converted(config, tmp_path / "ours")


def test_copies_prefixes_and_relics_are_understood(directory: Callable) -> None:
    arrays = files.read_tensors(directory("roberta"))
    expected = dict(arrays)
    embedding = "roberta.embeddings.word_embeddings.weight"
    arrays["lm_head.decoder.weight"] = arrays[embedding]
    arrays["lm_head.decoder.bias"] = arrays["lm_head.bias"]
    arrays["roberta.embeddings.position_ids"] = np.arange(34)[None]
    normalize = EncoderWithHead.normalize_names
    jax.tree.map(np.testing.assert_array_equal, normalize(arrays, {}), expected)
    bare = {name.removeprefix("roberta."): array for name, array in arrays.items()}
    jax.tree.map(np.testing.assert_array_equal, normalize(bare, {}), expected)
    with pytest.raises(CheckpointError, match="only tied logits are supported"):
        other = {**arrays, "lm_head.decoder.weight": arrays[embedding] + 1}
        normalize(other, {})


@pytest.mark.slow  # The quick tests in test_convert.py and test_weights.py also convert models.
def test_a_bare_encoder_gets_a_new_head(source: Path, tmp_path: Path) -> None:
    arrays = files.read_tensors(source)
    bare = {name: array for name, array in arrays.items() if not name.startswith("lm_head")}
    bare["pooler.dense.weight"] = np.zeros((16, 16), np.float32)
    files.write_tensors(source, bare)
    lines = list(convert.from_hf(source, tmp_path / "ours", verified=True))
    assert any("initialised" in line and "head/logits_bias" in line for line in lines)
    assert any("not read" in line and "pooler.dense.weight" in line for line in lines)
    old, new = pretrained.read(source)[0].params, pretrained.load(tmp_path / "ours")
    jax.tree.map(np.testing.assert_array_equal, new["encoder"], old["encoder"])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"position_embedding_type": "relative_key"}, "= 'relative_key'; only 'absolute' is"),
        ({"is_decoder": True}, "is_decoder = True; only False is supported"),
        ({"pad_token_id": 0}, "pad_token_id = 0; only 1 is supported"),
        ({"hidden_act": "silu"}, "hidden_act = 'silu' is not supported"),
        ({"hidden_size": None}, "config.json has no 'hidden_size'"),
        ({"intermediate_size": 20}, r"24.*, not .*20.* as config.json has it"),
    ],
)
def test_settings_of_roberta_that_brt_lacks_are_refused(
    source: Path, change: dict, sentence: str
) -> None:
    theirs = {**files.read_json(source / "config.json"), **change}
    theirs = {name: value for name, value in theirs.items() if value is not None}
    (source / "config.json").write_text(json.dumps(theirs))
    with pytest.raises(CheckpointError, match=sentence):
        pretrained.read(source)


def test_missing_arrays_are_refused(source: Path) -> None:
    arrays = files.read_tensors(source)
    name = "roberta.encoder.layer.1.output.dense.bias"
    files.write_tensors(source, {k: v for k, v in arrays.items() if k != name})
    with pytest.raises(CheckpointError, match=f"the checkpoint lacks {name}"):
        pretrained.read(source)
