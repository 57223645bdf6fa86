"""Reads and writes directories of converted encoder-decoders, from which training can start.

`brt.convert --to=brt` writes such a directory from a Hugging Face checkpoint. It contains:

params.safetensors   float32 parameters with brt's names, an array for each layer
model.json           the sections Seq2Seq and CrossAttention of the config
generation.json      special tokens and generation settings
original             config.json and generation_config.json of the checkpoint
...                  unchanged files of the tokenizer
"""

from collections.abc import Mapping
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
from brt.interop.huggingface import files
from brt.interop.huggingface.config import Described
from brt.interop.huggingface.weights import (
    by_layer,
    stack_layers,
    template,
    with_cross_attention,
)
from brt.models.seq2seq import SpecialTokens

PARAMS = "params.safetensors"
MODEL = "model.json"
GENERATION = "generation.json"
FORMAT = 1


class Pretrained(NamedTuple):
    """An encoder-decoder between Hugging Face's format and brt's. `params` are the float32
    parameters of `brt.models.seq2seq.Seq2Seq`.
    """

    params: dict[str, Any]
    described: Described


def save(directory: Path, pretrained: Pretrained) -> None:
    """Writes a converted encoder-decoder into an existing directory, without its tokenizer."""
    described = pretrained.described
    write_params(directory, pretrained.params)
    sections = config_json(Config(seq2seq=described.model, cross_attention=described.cross))
    content = {name: sections[name] for name in ("Seq2Seq", "CrossAttention")}
    files.write_json(directory / MODEL, {"format": FORMAT, **content})
    files.write_json(
        directory / GENERATION,
        {
            "special_tokens": described.special._asdict(),
            "defaults": described.generation,
            "tasks": described.tasks,
        },
    )


def load(directory: Path, cross: CrossAttention | None = None) -> Pretrained:
    """Reads a directory that `save` wrote.

    Settings of cross-attention in `cross` replace the saved settings. Parameters that they need and
    the directory lacks are then initialised.
    """
    described = describe(directory)
    params = read_params(directory, template(described.model, described.cross))
    if cross is not None:
        params = with_cross_attention(params, described.model, cross)
        described = described._replace(cross=cross)
    return Pretrained(params, described)


def write_params(directory: Path, params: dict[str, Any]) -> None:
    """Writes float32 parameters, whose layers are stacked, with an array for each layer."""
    flat = by_layer(params)
    files.write_file(directory / PARAMS, {name: np.asarray(x) for name, x in flat.items()})


def read_params(directory: Path, expected: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
    """Returns the float32 parameters in a directory as the nested dictionary that `Seq2Seq` or
    `EncoderWithHead` takes.

    The file has one array per layer, such as "encoder/layers_0/mlp/wi/kernel", and must have
    exactly the names and shapes of `expected`. In the nested dictionary, the arrays of all layers
    are stacked along a new first axis, as in {"encoder": {"layers": {"mlp": {"wi": {"kernel":
    [layers, ...]}}}}}.
    """
    arrays = files.read_file(directory / PARAMS)
    shapes = {name: array.shape for name, array in arrays.items()}
    for name in sorted(shapes.keys() | expected.keys()):
        wanted = expected[name].shape if name in expected else None
        if shapes.get(name) != wanted:
            raise CheckpointError(
                f"{directory / PARAMS}: {name} is {shapes.get(name, 'missing')}, but "
                f"{'nothing' if wanted is None else wanted} by {MODEL}"
            )
    return stack_layers({name: jnp.asarray(array, jnp.float32) for name, array in arrays.items()})


def describe(directory: Path) -> Described:
    """Returns the settings of the encoder-decoder in a directory, without reading the parameters.
    Raises CheckpointError for an encoder without a decoder, too.
    """
    if not (directory / MODEL).is_file():
        raise CheckpointError(
            f"{directory} has no {MODEL}; python -m brt.convert --from=hf DIR --to=brt OUT writes "
            "one"
        )
    content = read_model(directory)
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
        return Described(
            config.seq2seq, config.cross_attention, special, saved["defaults"], saved["tasks"]
        )
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{directory / GENERATION} is not of brt: {error}") from error


def read_model(directory: Path) -> dict[str, Any]:
    """Returns the entries of model.json, after a check of the version of the format."""
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
