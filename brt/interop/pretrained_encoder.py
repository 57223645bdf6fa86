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
    """An encoder between Hugging Face's format and brt's. `params` are the float32 parameters of
    `brt.models.encoder.EncoderWithHead`.
    """

    params: dict[str, Any]
    described: Described


def is_encoder_directory(directory: Path) -> bool:
    """Returns True for a directory that `save` wrote, and False for one of another model."""
    path = directory / MODEL
    return path.is_file() and "Encoder" in files.read_json(path)


def save(directory: Path, pretrained: PretrainedEncoder) -> None:
    """Writes a converted encoder into an existing directory, without its tokenizer."""
    described = pretrained.described
    write_params(directory, pretrained.params)
    section = config_json(Config(encoder=described.model))["Encoder"]
    content = {"format": FORMAT, "Encoder": section, "task": described.task, "kept": described.kept}
    files.write_json(directory / MODEL, content)


def load(directory: Path) -> PretrainedEncoder:
    """Reads a directory that `save` wrote."""
    described = describe(directory)
    return PretrainedEncoder(read_params(directory, template(described)), described)


def describe(directory: Path) -> Described:
    """Returns the settings of the encoder in a directory, without reading the parameters."""
    content = read_model(directory)
    task, kept = content.get("task"), content.get("kept")
    if "Encoder" not in content or task not in HEADS or not isinstance(kept, dict):
        raise CheckpointError(f"{directory / MODEL} describes no encoder")
    return Described(config_from_json({"Encoder": content["Encoder"]}).encoder, task, kept)


def extend_positions(
    pretrained: PretrainedEncoder, length: int, method: str = "copy"
) -> PretrainedEncoder:
    """Returns the encoder with a longer table of learned positions. The method "copy" repeats the
    table from its start, and "interpolate" stretches it.
    """
    params, described = pretrained
    inputs = params["encoder"]["inputs"]
    table = extended_position_table(inputs["pos_embed"], length, method)
    params = {**params, "encoder": {**params["encoder"], "inputs": {**inputs, "pos_embed": table}}}
    model = dataclasses.replace(described.model, max_positions=length)
    return PretrainedEncoder(params, described._replace(model=model))
