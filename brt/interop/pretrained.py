"""A model that training or generation can start from: a directory.

params.safetensors   float32, by our names and by layer
model.json           the sections Seq2Seq and CrossAttention
generation.json      special tokens, and how texts are to be written
...                  the tokenizer's files, as they came
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
from brt.errors import CheckpointError
from brt.interop.huggingface import files
from brt.interop.huggingface.config import Described
from brt.interop.huggingface.layers import by_layer, stacked
from brt.interop.huggingface.weights import template, with_cross_attention
from brt.models.targets import SpecialTokens

PARAMS = "params.safetensors"
MODEL = "model.json"
GENERATION = "generation.json"
FORMAT = 1
TOKENIZER_FILES = (
    "spiece.model", "sentencepiece.bpe.model", "tokenizer.model", "tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt",
)  # fmt: skip


class Pretrained(NamedTuple):
    """What the directory holds.

    Attributes:
      params: float32 arrays, as `brt.models.seq2seq.Seq2Seq` names them.
      described: settings, special tokens, generation.
    """

    params: dict[str, Any]
    described: Described


def save(directory: Path, pretrained: Pretrained) -> None:
    """Writes all but the tokenizer's files into a directory that exists."""
    described = pretrained.described
    write_params(directory, pretrained.params)
    sections = config_json(Config(seq2seq=described.model, cross_attention=described.cross))
    own = {name: sections[name] for name in ("Seq2Seq", "CrossAttention")}
    files.write_json(directory / MODEL, {"format": FORMAT, **own})
    files.write_json(
        directory / GENERATION,
        {
            "special_tokens": described.special._asdict(),
            "defaults": described.generation,
            "tasks": described.tasks,
        },
    )


def load(directory: Path, cross: CrossAttention | None = None) -> Pretrained:
    """Reads what `save` wrote.

    Args:
      cross: another cross-attention than the saved one; its own parameters are initialised.

    Raises:
      CheckpointError: something is missing, damaged, of a newer format, or does not fit.
      ConfigError: settings that this version does not know.
    """
    described = describe(directory)
    params = read_params(directory, template(described.model, described.cross))
    if cross is not None:
        params = with_cross_attention(params, described.model, cross)
        described = described._replace(cross=cross)
    return Pretrained(params, described)


def write_params(directory: Path, params: dict[str, Any]) -> None:
    """Writes what `read_params` reads."""
    flat = by_layer(params)
    files.write_file(directory / PARAMS, {name: np.asarray(x) for name, x in flat.items()})


def read_params(directory: Path, expected: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
    """The parameters of a directory, float32.

    Args:
      expected: what they must be, by names as "encoder/layers_0/mlp/wi/kernel".

    Raises:
      CheckpointError: they are missing, damaged or others.
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
    return stacked({name: jnp.asarray(array, jnp.float32) for name, array in arrays.items()})


def describe(directory: Path) -> Described:
    """The settings alone.

    Raises:
      CheckpointError: they are missing, damaged or of a newer format.
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
        special = SpecialTokens(**saved["special_tokens"])
        return Described(
            config.seq2seq, config.cross_attention, special, saved["defaults"], saved["tasks"]
        )
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{directory / GENERATION} is not of brt: {error}") from error


def read_model(directory: Path) -> dict[str, Any]:
    """The content of model.json.

    Raises:
      CheckpointError: it is damaged or of a newer format.
    """
    content = files.read_json(directory / MODEL)
    if (version := content.pop("format", None)) != FORMAT:
        raise CheckpointError(
            f"{directory / MODEL} has format {version!r}; this version of brt reads {FORMAT}"
        )
    return content


def copy_tokenizer(source: Path, target: Path) -> list[str]:
    """Copies what tokenizers are made of; returns the names."""
    found = [name for name in TOKENIZER_FILES if (source / name).is_file()]
    for name in found:
        copyfile(source / name, target / name)
    return found


def parameter_count(params: Any) -> int:
    """All numbers of a tree."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
