"""Types that all conversions from and to the format of another library have in common.

A task makes an `ExportableModel` from the `ExportSource` of a trained run.
`ExportableModel.to_format` computes the `ExportFormat`, which is everything that is written.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

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
      settings: JSON objects by file name, including config.json.
      arrays: the float32 weights by the other library's names.
      verify: compares the model in the written directory, its argument, with the original model;
        yields lines of a report for the user, and raises CheckpointError if the models differ.
      code: Python files to copy into the directory, if no library has the code that loads the
        model.
      notes: lines for the user about what the exported model computes otherwise than the original.
      file: the name of the file of weights, if it is not that of a model.
    """

    summary: str
    settings: Mapping[str, Mapping[str, Any]]
    arrays: Mapping[str, np.ndarray]
    verify: Callable[[Path], Iterator[str]]
    code: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()
    file: str = "model.safetensors"


class ExportSource(NamedTuple):
    """A trained run whose model is to be exported.

    Attributes:
      path: the directory of the run, for messages.
      tokenizer: a function that opens the tokenizer of the run, for formats that include one.
      plain: True exports a language model as a class of the library transformers, even if this
        class attends to the whole context where the model has a window. False exports such a model
        together with PyTorch code that has the window. Models of other tasks are always exported as
        classes of transformers.
      adapters: the factors of low-rank adapters (`brt.training.trainable`) by the names of their
        kernels, and other trained parameters. They are exported alone in PEFT's format; {} exports
        the model, to which the adapters are added.
    """

    path: Path
    config: Config
    params: PyTree[Array]
    tokenizer: Callable[[], Any]
    plain: bool = False
    adapters: PyTree[Array] = {}


class ExportableModel(NamedTuple):
    """A model that can be exported, with the functions that export it.

    Attributes:
      source: the directory that the model comes from, for messages.
      to_format: returns the content of the exported directory, given `model` and the name of the
        dtype of the written weights. It raises CheckpointError if the format cannot express the
        model.
      copy_tokenizer: writes the tokenizer's files into a directory, and returns their names.
      notes: further lines for users of the exported model, in addition to `ExportFormat.notes`.
    """

    source: Path
    model: Any
    to_format: Callable[[Any, str], ExportFormat]
    copy_tokenizer: Callable[[Path], list[str]]
    notes: tuple[str, ...] = ()


@runtime_checkable
class Described(Protocol):
    """Everything that describes an encoder-decoder or an encoder except its parameters.

    In names of methods, `theirs` stands for Hugging Face.
    """

    @property
    def model(self) -> Any:
        """The section of brt's config."""

    @property
    def stated(self) -> Collection[str]:
        """The keys of generation_config.json (of an encoder: config.json) that brt applies, and
        that an export states.
        """

    @classmethod
    def from_theirs(
        cls, config: Mapping[str, Any], generation: Mapping[str, Any], names: Collection[str]
    ) -> "Described":
        """Returns the description of a checkpoint from the content of config.json and of
        generation_config.json, which may be empty, and from the names of the arrays.
        """

    @staticmethod
    def unread_keys(config: Mapping[str, Any]) -> list[str]:
        """Returns the keys of a config.json that brt does not use."""

    @staticmethod
    def normalize_names(
        arrays: Mapping[str, np.ndarray], config: Mapping[str, Any]
    ) -> dict[str, np.ndarray]:
        """Returns the arrays of a checkpoint by the names that current versions of transformers
        use. Some files contain copies of arrays, or names without the usual prefix.
        """

    def to_theirs(self, dtype: str) -> dict[str, dict[str, Any]]:
        """Returns the content of config.json and generation_config.json, by name, for weights of
        the dtype. Raises CheckpointError if a setting has no counterpart in Hugging Face's format.
        """

    def parameter_names(self) -> dict[str, str]:
        """Returns Hugging Face's name of each parameter by brt's name.

        In both names, {i} stands for the index of a layer. The table may have names of parameters
        that the model does not have.
        """

    def may_lack(self, ours: str) -> bool:
        """Returns True if a checkpoint may lack the parameter, which is then initialised."""

    def initial_params(self) -> dict[str, Any]:
        """Returns newly initialised parameters, whose layers are stacked."""

    def with_copies(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the arrays of an export with those that only Hugging Face's models have."""

    def extend_positions(self, params: Any, length: int, method: str) -> dict[str, Any]:
        """Returns parameters with a table of `length` learned positions. The method "copy" repeats
        the table from its start, and "interpolate" stretches it.
        """

    def inputs(self) -> dict[str, np.ndarray]:
        """Returns two rows of random inputs, the second one shorter, by the names of arguments in
        transformers.
        """

    def logits(self, params: Mapping[str, Any], x: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns the float32 logits that brt computes for `inputs`, by exact attention."""

    @property
    def transformers_class(self) -> str: ...

    def their_logits(self, output: Any, x: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns the logits, in the form of `logits`, of what transformers computes for `x`."""

    def is_comparable(self, initialised: Collection[str]) -> bool:
        """Returns True if transformers computes the same logits, where a checkpoint lacked the
        parameters `initialised`.
        """

    def summary(self) -> str: ...

    def notes(self) -> tuple[str, ...]:
        """Returns what transformers will compute otherwise than brt."""


def no_export_format(source: Path) -> CheckpointError:
    """Returns the error for the run in the directory `source`, whose model no other library has."""
    return CheckpointError(
        f"{source} is the run of another model; only language models, summarisers and encoders "
        "can be exported to Hugging Face's format"
    )
