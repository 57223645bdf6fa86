"""A model on its way to somebody else's form, wherever it comes from."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from brt.errors import CheckpointError
from brt.interop import pretrained, pretrained_encoder
from brt.interop.pretrained import Pretrained
from brt.interop.pretrained_encoder import PretrainedEncoder

# Tokenizer files as others look for them.
NAMES = {".model": "spiece.model", ".json": "tokenizer.json"}


class Exported(NamedTuple):
    """What there is to write.

    Attributes:
      source: where it comes from.
      copy_tokenizer: writes the tokenizer's files into a directory, and says which.
      notes: what others should know of it, and a form does not tell.
    """

    source: Path
    model: Pretrained | PretrainedEncoder
    copy_tokenizer: Callable[[Path], list[str]]
    notes: tuple[str, ...] = ()


def converted(source: Path) -> Exported:
    """What brt.convert --to=brt wrote.

    Raises:
      CheckpointError: there is no such thing.
    """
    encoder = pretrained_encoder.is_one(source)
    model = (pretrained_encoder if encoder else pretrained).load(source)
    return Exported(source, model, lambda target: pretrained.copy_tokenizer(source, target))


def no_form(source: Path) -> CheckpointError:
    """What to say of a model that others have no form for."""
    return CheckpointError(
        f"{source} is the run of another model; only summarisers and encoders have a form of "
        "Hugging Face"
    )
