"""Common structure of all exports to another library's format."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, PyTree

from brt.config import Config
from brt.errors import CheckpointError

# transformers expects tokenizer files under these names, by the suffix of brt's file.
NAMES = {".model": "spiece.model", ".json": "tokenizer.json"}


class ExportFormat(NamedTuple):
    """Content of an exported directory.

    Attributes:
      summary: one line that describes the model.
      settings: JSON objects by file name, including config.json.
      arrays: float32 arrays by name.
      verify: function that compares the model in the written directory, which is its argument, with
        the original model. It yields lines about the comparison, and raises CheckpointError if the
        models differ.
      code: files of Python code that is needed to load the model, if no library contains it.
      notes: differences in what the exported model computes.
    """

    summary: str
    settings: Mapping[str, Mapping[str, Any]]
    arrays: Mapping[str, np.ndarray]
    verify: Callable[[Path], Iterator[str]]
    code: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()


class ExportSource(NamedTuple):
    """A trained run whose model is to be exported.

    Attributes:
      path: directory of the run, for messages.
      config: config of the run.
      params: trained parameters.
      tokenizer: function that opens the tokenizer of the run, for formats that include one.
      plain: True asks for a class of transformers, even if the class attends to the whole context
        where the model has a window. Only language models read this field, because other models
        have no other form.
    """

    path: Path
    config: Config
    params: PyTree[Array]
    tokenizer: Callable[[], Any]
    plain: bool = False


class Exported(NamedTuple):
    """A model to export, with the functions that write it.

    Attributes:
      source: path that the model comes from.
      model: parameters and settings of the model, in the form that `to_format` takes.
      to_format: function of the model and a dtype that returns the content of the exported
        directory; raises CheckpointError if the model cannot be expressed in the format.
      copy_tokenizer: function that writes the tokenizer's files into a directory and returns their
        names.
      notes: further notes for users of the exported model.
    """

    source: Path
    model: Any
    to_format: Callable[[Any, str], ExportFormat]
    copy_tokenizer: Callable[[Path], list[str]]
    notes: tuple[str, ...] = ()


def no_export_format(source: Path) -> CheckpointError:
    """Returns the error for a run whose model no other library has; `source` is the directory of
    the run.
    """
    return CheckpointError(
        f"{source} is the run of another model; only language models, summarisers and encoders "
        "can be exported to Hugging Face's format"
    )
