"""Reads and writes directories of converted encoders, from which training can start.

params.safetensors   float32 parameters with brt's names, by layer
model.json           the section Encoder, the task of the head, other entries of config.json
...                  unchanged files of the tokenizer
"""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

from brt.config import Config
from brt.config_io import config_from_json, config_json
from brt.errors import CheckpointError
from brt.interop.huggingface import files
from brt.interop.huggingface.roberta.config import HEADS, Described
from brt.interop.huggingface.roberta.weights import template
from brt.interop.pretrained import FORMAT, MODEL, read_model, read_params, write_params
from brt.models.seq2seq import extended


class PretrainedEncoder(NamedTuple):
    """A converted encoder.

    Attributes:
      params: float32 parameters of `brt.models.encoder.EncoderWithHead`.
      described: settings of the encoder, and the task of its head.
    """

    params: dict[str, Any]
    described: Described


def is_one(directory: Path) -> bool:
    """Returns True if the directory contains an encoder that `save` wrote; False for a directory of
    another model.
    """
    path = directory / MODEL
    return path.is_file() and "Encoder" in files.read_json(path)


def save(directory: Path, pretrained: PretrainedEncoder) -> None:
    """Writes all files of a converted encoder into an existing directory, except the tokenizer's
    files.
    """
    described = pretrained.described
    write_params(directory, pretrained.params)
    section = config_json(Config(encoder=described.model))["Encoder"]
    content = {"format": FORMAT, "Encoder": section, "task": described.task, "kept": described.kept}
    files.write_json(directory / MODEL, content)


def load(directory: Path) -> PretrainedEncoder:
    """Reads a directory that `save` wrote.

    Raises:
      CheckpointError: a file is missing, damaged, of a newer format, or contradicts another file.
      ConfigError: this version does not know a setting.
    """
    described = describe(directory)
    return PretrainedEncoder(read_params(directory, template(described)), described)


def describe(directory: Path) -> Described:
    """Returns the settings that a directory contains, without reading the parameters.

    Raises:
      CheckpointError: a file is missing, damaged or of a newer format.
      ConfigError: this version does not know a setting.
    """
    content = read_model(directory)
    task, kept = content.get("task"), content.get("kept")
    if "Encoder" not in content or task not in HEADS or not isinstance(kept, dict):
        raise CheckpointError(f"{directory / MODEL} describes no encoder")
    return Described(config_from_json({"Encoder": content["Encoder"]}).encoder, task, kept)


def extend_positions(
    pretrained: PretrainedEncoder, length: int, method: str = "copy"
) -> PretrainedEncoder:
    """Returns the encoder with learned positions for `length` tokens.

    Args:
      pretrained: the encoder.
      length: new number of positions.
      method: values of the new positions: "copy" repeats the table, and "interpolate" stretches it.
    """
    params, described = pretrained
    inputs = params["encoder"]["inputs"]
    table = extended(inputs["pos_embed"], length, method)
    params = {**params, "encoder": {**params["encoder"], "inputs": {**inputs, "pos_embed": table}}}
    model = dataclasses.replace(described.model, max_positions=length)
    return PretrainedEncoder(params, described._replace(model=model))
