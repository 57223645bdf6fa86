"""A model on its way to somebody else's form, wherever it comes from."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from brt.errors import CheckpointError

# Tokenizer files as others look for them.
NAMES = {".model": "spiece.model", ".json": "tokenizer.json"}


class Form(NamedTuple):
    """What others read of a model.

    Attributes:
      summary: what it is.
      settings: JSON objects by the names of their files, config.json among them.
      arrays: float32, by their names.
      verified: given the directory with all this, lines of a comparison with the model; raises
        CheckpointError where they differ.
      code: files that read it, where no library does.
      notes: what is computed otherwise there.
    """

    summary: str
    settings: Mapping[str, Mapping[str, Any]]
    arrays: Mapping[str, np.ndarray]
    verified: Callable[[Path], Iterator[str]]
    code: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()


class Exported(NamedTuple):
    """What there is to write.

    Attributes:
      source: where it comes from.
      model: parameters and settings.
      form: of such a model in a dtype; raises CheckpointError where there is none.
      copy_tokenizer: writes the tokenizer's files into a directory, and says which.
      notes: what others should know of it, and a form does not tell.
    """

    source: Path
    model: Any
    form: Callable[[Any, str], Form]
    copy_tokenizer: Callable[[Path], list[str]]
    notes: tuple[str, ...] = ()


def no_form(source: Path) -> CheckpointError:
    """What to say of a model that others have no form for."""
    return CheckpointError(
        f"{source} is the run of another model; only language models, summarisers and encoders "
        "have a form of Hugging Face"
    )
