"""Reads and writes directories of converted encoders, from which training can start.

`brt.convert --to=brt` writes such a directory from a RoBERTa checkpoint. It contains:

params.safetensors   float32 parameters with brt's names, an array for each layer
model.json           the config's section Encoder, the task of the head, the ids of special tokens
                     and the names of classes
original             config.json and generation_config.json of the checkpoint
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
from brt.models.seq2seq import extended_position_table


class PretrainedEncoder(NamedTuple):
    """An encoder in the form in which it is converted from and to Hugging Face's format.

    Attributes:
      params: the float32 parameters of `brt.models.encoder.EncoderWithHead`.
      described: the settings of the encoder, and the task of its head.
    """

    params: dict[str, Any]
    described: Described


def is_encoder_directory(directory: Path) -> bool:
    """Returns True if the directory contains an encoder that `save` wrote; False for a directory of
    another model.
    """
    path = directory / MODEL
    return path.is_file() and "Encoder" in files.read_json(path)


def save(directory: Path, pretrained: PretrainedEncoder) -> None:
    """Writes all files of a converted encoder into an existing directory, except the files of the
    tokenizer.
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
    """Returns the settings of the encoder in a directory, without reading the parameters.

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
    """Returns the encoder with a longer table of learned positions.

    Args:
      pretrained: the encoder.
      length: the new number of positions.
      method: how the new positions are computed: "copy" repeats the table from its start, and
        "interpolate" stretches it.

    Raises:
      ConfigError: the method is unknown, or there would be fewer positions.
    """
    params, described = pretrained
    inputs = params["encoder"]["inputs"]
    table = extended_position_table(inputs["pos_embed"], length, method)
    params = {**params, "encoder": {**params["encoder"], "inputs": {**inputs, "pos_embed": table}}}
    model = dataclasses.replace(described.model, max_positions=length)
    return PretrainedEncoder(params, described._replace(model=model))
