"""Reads decoders from directories in Hugging Face's format."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from brt.config import Model
from brt.data import tokenizers
from brt.data.tokenizers import Tokenizer
from brt.errors import CheckpointError, DataError
from brt.interop.huggingface import files
from brt.interop.huggingface.causal import config, weights
from brt.interop.huggingface.causal.config import Window
from brt.interop.huggingface.weights import Arrays


class PretrainedDecoder(NamedTuple):
    """A decoder in Hugging Face's format, whose arrays are not read yet.

    Attributes:
      directory: the directory.
      described: the content of config.json.
      model: brt's settings of the model.
      tokenizer: the tokenizer.
      tokenizer_file: the path of the file that the tokenizer was read from.
    """

    directory: Path
    described: Mapping[str, Any]
    model: Model
    tokenizer: Tokenizer
    tokenizer_file: Path

    def arrays(self) -> Arrays:
        """Reads the arrays of the checkpoint.

        Raises:
          CheckpointError: there are none, or they are damaged.
        """
        return files.read_tensors(self.directory)

    def params(self) -> dict[str, Any]:
        """Reads the parameters of brt's decoder.

        Raises:
          CheckpointError: an array is missing, damaged, or has no place in the model.
        """
        return weights.import_arrays(self.arrays(), self.model)


def is_decoder(directory: Path) -> bool:
    """Returns True if a directory in Hugging Face's format has a decoder that brt reads."""
    path = directory / "config.json"
    return path.is_file() and files.read_json(path).get("model_type") in config.FAMILIES


def describe(directory: Path, reading: Window = Window()) -> PretrainedDecoder:  # noqa: B008
    """Reads everything of a decoder but its arrays.

    Args:
      directory: the directory in Hugging Face's format.
      reading: the window and the sinks of the layers that have no window of their own.

    Raises:
      CheckpointError: config.json is damaged, or asks for something that brt does not compute.
      DataError: the tokenizer cannot be used.
    """
    described = files.read_json(directory / "config.json")
    model = config.from_theirs(described, reading)
    if (generation := directory / "generation_config.json").is_file():
        own = config.end_ids(files.read_json(generation), model.vocab_size)
        model = dataclasses.replace(model, end_ids=own or model.end_ids)
    tokenizer, file = _tokenizer(directory)
    if tokenizer.vocab_size > model.vocab_size:
        raise CheckpointError(
            f"the tokenizer of {directory} has {tokenizer.vocab_size:,} ids, but config.json says "
            f"vocab_size = {model.vocab_size:,}"
        )
    return PretrainedDecoder(directory, described, model, tokenizer, file)


def _tokenizer(directory: Path) -> tuple[Tokenizer, Path]:
    """Returns the tokenizer of a directory, and the path of its file.

    Raises:
      DataError: the directory has none that keeps every byte of a text.
    """
    reasons = []
    for name in ("tokenizer.json", "tokenizer.model"):
        if (path := directory / name).is_file():
            try:
                return tokenizers.load(str(path)), path
            except DataError as error:
                reasons.append(str(error))
    if reasons:
        raise DataError("; ".join(reasons))
    raise DataError(f"{directory} has neither tokenizer.json nor tokenizer.model")
