from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from brt.config import CrossAttention
from brt.errors import CheckpointError
from brt.interop import pretrained
from brt.interop.huggingface import files
from brt.interop.huggingface.encoder_decoder import UNUSED, EncoderDecoder

SRFORMER = CrossAttention(kind="srformer", segment_size=4, mix="sigma")


def assert_equal(actual: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_what_is_imported_is_exported_again(read: Callable, directory: Callable, name: str) -> None:
    model, _, imported = read(name)
    saved = files.read_tensors(directory(name))
    exported = pretrained.export_arrays(model.params, model.described)
    assert exported.keys() == saved.keys()
    assert_equal(exported, saved)
    assert imported.initialised == [] and imported.unexpected == []


def test_the_recurrence_has_the_names_of_its_authors(read: Callable) -> None:
    model, arrays, _ = read("t5")
    described = model.described._replace(cross=SRFORMER)
    imported = pretrained.import_arrays(arrays, described)
    parts = ("kernel", "leak", "sigma", "threshold")
    expected = [f"decoder/layers/cross_attn/raf/{part}" for part in parts]
    assert sorted(imported.initialised) == expected
    exported = pretrained.export_arrays(imported.params, described)
    theirs = "decoder.block.2.layer.1.EncDecAttention."
    raf = imported.params["decoder"]["layers"]["cross_attn"]["raf"]
    assert_equal(exported[theirs + "SNN_kv.weight"], np.asarray(raf["kernel"][2]).T)
    assert exported[theirs + "leak"].shape == exported[theirs + "threshold"].shape == (1,)
    again = pretrained.import_arrays(exported, described)
    assert again.initialised == []
    assert_equal(again.params, imported.params)


def test_another_cross_attention_keeps_all_it_shares(read: Callable) -> None:
    model = read("bart")[0]
    params = pretrained.adapt(model.params, model.described._replace(cross=SRFORMER))
    assert "raf" in params["decoder"]["layers"]["cross_attn"]
    back = pretrained.adapt(params, model.described)
    assert_equal(back, model.params)


@pytest.mark.parametrize("source", ["t5", "bart"])
def test_copies_prefixes_and_relics_are_understood(
    read: Callable, directory: Callable, source: str
) -> None:
    model, expected, _ = read(source)
    arrays = files.read_tensors(directory(source))
    prefix = "model." if source == "bart" else ""
    embedding = arrays[f"{prefix}shared.weight"]
    for copy in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"):
        arrays[prefix + copy] = embedding
    arrays["lm_head.weight"] = embedding
    arrays[UNUSED] = np.zeros((8, 2), np.float32)
    config = {"model_type": source}
    assert_equal(EncoderDecoder.normalize_names(arrays, config), expected)
    bare = {name.removeprefix("model."): array for name, array in arrays.items()}
    assert_equal(EncoderDecoder.normalize_names(bare, config), expected)
    del bare["shared.weight"]
    assert_equal(EncoderDecoder.normalize_names(bare, config), expected)
    different = {**arrays, prefix + "encoder.embed_tokens.weight": embedding + 1}
    with pytest.raises(CheckpointError, match="only one embedding is supported"):
        EncoderDecoder.normalize_names(different, config)


def test_what_does_not_match_is_named(read: Callable) -> None:
    model, arrays, _ = read("t5")
    described = model.described
    name = "encoder.block.1.layer.0.SelfAttention.k.weight"
    imported = pretrained.import_arrays({**arrays, "more.weight": arrays[name]}, described)
    assert imported.unexpected == ["more.weight"]
    with pytest.raises(CheckpointError, match=f"lacks {name}$"):
        pretrained.import_arrays({k: v for k, v in arrays.items() if k != name}, described)
    with pytest.raises(CheckpointError, match=rf"{name} is \(16, 15\), not \(16, 16\)"):
        pretrained.import_arrays({**arrays, name: arrays[name][:, 1:]}, described)
    bart, of_bart, _ = read("bart")
    without = {name: array for name, array in of_bart.items() if name != "final_logits_bias"}
    imported = pretrained.import_arrays(without, bart.described)
    assert imported.initialised == ["logits_bias"]
    assert not np.any(imported.params["logits_bias"])
    memory = described._replace(cross=CrossAttention(kind="xl_memory", segment_size=4))
    params = pretrained.adapt(model.params, memory)
    with pytest.raises(CheckpointError, match="no names for decoder/layers/cross_attn/memory"):
        pretrained.export_arrays(params, memory)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_files_in_parts_hold_the_same(tmp_path: Path, read: Callable, dtype: Any) -> None:
    arrays = {name: array.astype(dtype) for name, array in read("t5")[1].items()}
    files.write_tensors(tmp_path, arrays, shard_bytes=6000)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    assert not (tmp_path / files.FILE).exists()
    found = files.read_tensors(tmp_path)
    assert {array.dtype for array in found.values()} == {np.dtype(dtype)}
    assert_equal(found, arrays)


def test_pickles_and_damaged_files_are_refused(tmp_path: Path, directory: Callable) -> None:
    with pytest.raises(CheckpointError, match="has no model.safetensors"):
        files.read_tensors(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"pickle.*save_pretrained\(OUT\)"):
        files.read_tensors(tmp_path)
    whole = (directory("t5") / files.FILE).read_bytes()
    (tmp_path / files.FILE).write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match="cannot be read"):
        files.read_tensors(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="which is no dict"):
        files.read_json(tmp_path / "config.json")


@pytest.mark.parametrize(
    "places", [None, [], "a", {"x": 1}, {"x": "../m.safetensors"}, {"x": "/m"}]
)
def test_an_index_names_files_beside_it(places: Any, tmp_path: Path, directory: Callable) -> None:
    (tmp_path / "m.safetensors").write_bytes((directory("t5") / files.FILE).read_bytes())
    inside = tmp_path / "model"
    inside.mkdir()
    files.write_json(inside / files.INDEX, {"weight_map": places})
    with pytest.raises(CheckpointError, match="no index of shards|shards must be in its directory"):
        files.read_tensors(inside)


def described(shape: str, dtype: str = "F32") -> bytes:
    """Returns the header of a file with one array."""
    return f'{{"x":{{"dtype":"{dtype}","shape":[{shape}],"data_offsets":[0,4]}}}}'.encode()


EMPTY = '"{:07}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
MANY = "{" + ",".join(EMPTY.format(i) for i in range(200_000)) + "}"


@pytest.mark.parametrize(
    ("header", "size", "sentence"),
    [
        (described("4", "F8_E4M3"), 0, "x is F8_E4M3, which is not read; save it as float32"),
        (described(",".join(["1"] * 70)), 0, "cannot be read: .*dimension"),
        (MANY.encode(), 0, "its header has"),
        (b"", 64 << 20, "header has 67,108,864 bytes"),
    ],
    ids=["dtype", "axes", "many arrays", "memory"],
)
def test_headers_that_cannot_be_read_are_one_sentence(
    header: bytes, size: int, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A huge header is refused before it is parsed."""
    if "header" in sentence:
        monkeypatch.setattr(files, "safe_open", None)
    with (tmp_path / files.FILE).open("wb") as file:
        file.write((size or len(header)).to_bytes(8, "little") + header + bytes(4))
        file.truncate(8 + (size or len(header)) + 4)
    with pytest.raises(CheckpointError, match=sentence):
        files.read_tensors(tmp_path)


def test_weights_that_cannot_be_written_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / files.FILE).mkdir()
    with pytest.raises(CheckpointError, match="safetensors cannot be written: .*free some space"):
        files.write_tensors(tmp_path, {"x": np.zeros(3, np.float32)})
