"""Types that all conversions to the format of another library have in common.

An `ExportSource` describes a trained run. From it, a task makes an `ExportFormat`, which has
everything that is written.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, PyTree

from brt.config import Config
from brt.errors import CheckpointError

# The keys are suffixes of brt's tokenizer files, and the values are the names under which
# transformers expects these files.
NAMES = {".model": "spiece.model", ".json": "tokenizer.json"}


class ExportFormat(NamedTuple):
    """The content of an exported directory, before it is written.

    Attributes:
      summary: one line for the user that describes the model.
      settings: JSON objects by file name, such as config.json.
      arrays: the float32 weights by the other library's names. They are written in a dtype that the
        user chooses, and the name of this dtype is added to config.json.
      verify: a function of the written directory. It compares the model in this directory with the
        original model, yields lines of a report for the user, and raises CheckpointError if the
        models differ.
      code: Python files to copy into the directory, if no library has the code that loads the
        model.
      notes: lines for the user about what the exported model computes differently from the
        original model.
      file: the name of the file of weights. Adapters are written to a file of another name.
      copy_tokenizer: writes the tokenizer's files into a directory, and returns their names.
    """

    summary: str
    settings: Mapping[str, Mapping[str, Any]]
    arrays: Mapping[str, np.ndarray]
    verify: Callable[[Path], Iterator[str]]
    code: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()
    file: str = "model.safetensors"
    copy_tokenizer: Callable[[Path], list[str]] = lambda _: []


class ExportSource(NamedTuple):
    """A trained run whose model is to be exported.

    Attributes:
      path: the directory of the run, for messages.
      tokenizer: a function that opens the tokenizer of the run, for formats that include one.
      plain: True exports a language model as a class of the library transformers, even if the
        class attends to the whole context and the model only to a window. False exports such a
        model together with PyTorch code that has the window. Models of other tasks are always
        exported as classes of transformers.
      adapters: the factors of low-rank adapters (`brt.training.trainable`) by the names of their
        kernels, and other trained parameters. If there are any, only `adapters` is exported, in
        PEFT's format. If `adapters` is {}, the whole model is exported, that is, `params`, in which
        the adapters have been added to their kernels.
    """

    path: Path
    config: Config
    params: PyTree[Array]
    tokenizer: Callable[[], Any]
    plain: bool = False
    adapters: PyTree[Array] = {}


def no_export_format(source: Path) -> CheckpointError:
    """Returns the error for a run, in `source`, of a model that no other library has."""
    return CheckpointError(
        f"{source} is the run of another model; only language models, summarisers and encoders "
        "can be exported to Hugging Face's format"
    )
