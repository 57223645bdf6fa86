"""An encoder that training can start from: a directory.

params.safetensors   float32, by our names and by layer
model.json           the section Encoder, the task of its head, what their config.json says beside
...                  the tokenizer's files, as they came
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
    """What the directory holds.

    Attributes:
      params: float32 arrays, as `brt.models.encoder.EncoderWithHead` names them.
      described: settings and task.
    """

    params: dict[str, Any]
    described: Described


def is_one(directory: Path) -> bool:
    """Whether `save` wrote it."""
    path = directory / MODEL
    return path.is_file() and "Encoder" in files.read_json(path)


def save(directory: Path, pretrained: PretrainedEncoder) -> None:
    """Writes all but the tokenizer's files into a directory that exists."""
    described = pretrained.described
    write_params(directory, pretrained.params)
    section = config_json(Config(encoder=described.model))["Encoder"]
    content = {"format": FORMAT, "Encoder": section, "task": described.task, "kept": described.kept}
    files.write_json(directory / MODEL, content)


def load(directory: Path) -> PretrainedEncoder:
    """Reads what `save` wrote.

    Raises:
      CheckpointError: something is missing, damaged, of a newer format, or does not fit.
      ConfigError: settings that this version does not know.
    """
    described = describe(directory)
    return PretrainedEncoder(read_params(directory, template(described)), described)


def describe(directory: Path) -> Described:
    """The settings alone; raises as `load`."""
    content = read_model(directory)
    task, kept = content.get("task"), content.get("kept")
    if "Encoder" not in content or task not in HEADS or not isinstance(kept, dict):
        raise CheckpointError(f"{directory / MODEL} describes no encoder")
    return Described(config_from_json({"Encoder": content["Encoder"]}).encoder, task, kept)


def extend_positions(
    pretrained: PretrainedEncoder, length: int, method: str = "copy"
) -> PretrainedEncoder:
    """The same with learned positions for `length` tokens; see `brt.models.seq2seq`'s."""
    params, described = pretrained
    inputs = params["encoder"]["inputs"]
    table = extended(inputs["pos_embed"], length, method)
    params = {**params, "encoder": {**params["encoder"], "inputs": {**inputs, "pos_embed": table}}}
    model = dataclasses.replace(described.model, max_positions=length)
    return PretrainedEncoder(params, described._replace(model=model))
