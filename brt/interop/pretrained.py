"""Reads and writes directories of converted encoder-decoders and encoders, from which training can
start.

`brt.convert --to=brt` writes such a directory from a Hugging Face checkpoint. It contains:

params.safetensors   float32 parameters with brt's names, an array for each layer
model.json           the sections Seq2Seq and CrossAttention of the config; or for an encoder, the
                     section Encoder, the task of the head, the ids of special tokens and the names
                     of classes
generation.json      special tokens and generation settings of an encoder-decoder
original             config.json and generation_config.json of the checkpoint
...                  unchanged files of the tokenizer
"""

from pathlib import Path
from shutil import copyfile
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from brt import untrusted
from brt.config import Config, CrossAttention
from brt.config_io import config_from_json, config_json
from brt.data import originals
from brt.errors import CheckpointError
from brt.interop.exporting import Described
from brt.interop.huggingface import files
from brt.interop.huggingface.encoder_decoder import EncoderDecoder
from brt.interop.huggingface.roberta import HEADS, EncoderWithHead
from brt.interop.huggingface.weights import adapt, by_layer, stack_layers, template
from brt.models.seq2seq import SpecialTokens

PARAMS = "params.safetensors"
MODEL = "model.json"
GENERATION = "generation.json"
FORMAT = 1


class Pretrained(NamedTuple):
    """A model between Hugging Face's format and brt's, with its float32 parameters."""

    params: dict[str, Any]
    described: EncoderDecoder | EncoderWithHead


def save(directory: Path, pretrained: Pretrained) -> None:
    """Writes a converted model into an existing directory, without its tokenizer."""
    params, described = pretrained
    flat = by_layer(params)
    files.write_file(directory / PARAMS, {name: np.asarray(x) for name, x in flat.items()})
    if isinstance(described, EncoderWithHead):
        section = config_json(Config(encoder=described.model))["Encoder"]
        content = {"Encoder": section, "task": described.task, "kept": described.kept}
    else:
        sections = config_json(Config(seq2seq=described.model, cross_attention=described.cross))
        content = {name: sections[name] for name in ("Seq2Seq", "CrossAttention")}
        special = described.special._asdict()
        generation = {"defaults": described.generation, "tasks": described.tasks}
        files.write_json(directory / GENERATION, {"special_tokens": special, **generation})
    files.write_json(directory / MODEL, {"format": FORMAT, **content})


def load(directory: Path, cross: CrossAttention | None = None) -> Pretrained:
    """Reads a directory that `save` wrote.

    The settings of cross-attention `cross` replace those of an encoder-decoder. Parameters that
    they need and the directory lacks are then initialised.
    """
    path = directory / MODEL
    if path.is_file() and "Encoder" in files.read_json(path):
        encoder = describe_encoder(directory)
        return Pretrained(_read_params(directory, encoder), encoder)
    described = describe(directory)
    params = _read_params(directory, described)
    if cross is not None:
        described = described._replace(cross=cross)
        params = adapt(params, described)
    return Pretrained(params, described)


def _read_params(directory: Path, described: Described) -> dict[str, Any]:
    # The file has one array per layer, such as "encoder/layers_0/mlp/wi/kernel". In the result, the
    # arrays of all layers are stacked along a new first axis, as in {"encoder": {"layers": {"mlp":
    # {"wi": {"kernel": [layers, ...]}}}}}.
    arrays, expected = files.read_file(directory / PARAMS), template(described)
    shapes = {name: array.shape for name, array in arrays.items()}
    for name in sorted(shapes.keys() | expected.keys()):
        wanted = expected[name].shape if name in expected else None
        if shapes.get(name) != wanted:
            raise CheckpointError(
                f"{directory / PARAMS}: {name} is {shapes.get(name, 'missing')}, but "
                f"{'nothing' if wanted is None else wanted} by {MODEL}"
            )
    return stack_layers({name: jnp.asarray(array, jnp.float32) for name, array in arrays.items()})


def describe(directory: Path) -> EncoderDecoder:
    """Returns the settings of the encoder-decoder in a directory, without reading the parameters.
    Raises CheckpointError for an encoder without a decoder, too.
    """
    if not (directory / MODEL).is_file():
        raise CheckpointError(
            f"{directory} has no {MODEL}; python -m brt.convert --from=hf DIR --to=brt OUT writes "
            "one"
        )
    content = _read_model(directory)
    if "Encoder" in content:
        raise CheckpointError(f"{directory} holds an encoder alone, which writes no summaries")
    config = config_from_json(content)
    saved = files.read_json(directory / GENERATION)
    ids = dict.fromkeys(("pad", "start", "eos"), int)
    kind = {"special_tokens": ids, "defaults": {str: object}, "tasks": {str: dict}}
    try:
        untrusted.check(saved, kind)
        # JSON has no tuples, and an encoder-decoder has no other end tokens than `eos`.
        special = SpecialTokens(**saved["special_tokens"])._replace(ends=())
        return EncoderDecoder(
            config.seq2seq, config.cross_attention, special, saved["defaults"], saved["tasks"]
        )
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{directory / GENERATION} is not of brt: {error}") from error


def describe_encoder(directory: Path) -> EncoderWithHead:
    """Returns the settings of the encoder in a directory, without reading the parameters."""
    content = _read_model(directory)
    task, kept = content.get("task"), content.get("kept")
    if "Encoder" not in content or task not in HEADS or not isinstance(kept, dict):
        raise CheckpointError(f"{directory / MODEL} describes no encoder")
    model = config_from_json({"Encoder": content["Encoder"]}).encoder
    return EncoderWithHead(model, task, kept)


def _read_model(directory: Path) -> dict[str, Any]:
    # Checks the version of the format.
    content = files.read_json(directory / MODEL)
    if (version := content.pop("format", None)) != FORMAT:
        raise CheckpointError(
            f"{directory / MODEL} has format {version!r}; this version of brt reads {FORMAT}"
        )
    return content


def copy_tokenizer(source: Path, target: Path) -> list[str]:
    """Copies the files of a tokenizer between directories, and returns their names."""
    names = [name for name in originals.names(source) if name not in originals.MODEL]
    for name in names:
        (target / name).parent.mkdir(exist_ok=True)
        copyfile(source / name, target / name)
    return names


def keep_settings(source: Path, target: Path) -> None:
    """Copies config.json and generation_config.json of a checkpoint into the directory of the
    converted model, where `brt.data.originals.read` finds them for an export.
    """
    (target / originals.DIRECTORY).mkdir()
    for name in originals.MODEL:
        if (source / name).is_file():
            copyfile(source / name, target / originals.DIRECTORY / name)


def parameter_count(params: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))
