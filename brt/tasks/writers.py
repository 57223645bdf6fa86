"""The interface of objects that generate text, and the options of a generated text."""

import abc
import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from brt.config import Sampling
from brt.data import plain_text
from brt.errors import ConfigError
from brt.generation.session import Session


class WriteOptions(NamedTuple):
    """Options of a generated text; None selects the task's default."""

    beams: int | None = None  # number of beams of a beam search; 1 is greedy decoding
    sampling: Sampling | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()  # texts before the first of which the text ends
    # True reads the names of special tokens in the prompt as these tokens.
    special_tokens: bool = False


def write_options(
    sampling: Sampling, *, beams: int | None, max_tokens: int | None, seed: int,
    stop: str | Sequence[str], special_tokens: bool, **drawn: float | None,
) -> WriteOptions:  # fmt: skip
    """Returns the options of a text that a user asks for, as described in `WriteOptions`.

    `drawn` are settings that replace those of `sampling` unless they are None. Raises ConfigError
    if an option is out of its range or contradicts another one, and DataError if a stop string is
    not valid text.
    """
    if beams is not None and beams < 1:
        raise ConfigError(f"beams={beams} must be above 0")
    if max_tokens is not None and max_tokens < 0:
        raise ConfigError(f"max_tokens={max_tokens} must not be negative")
    if not -(2**63) <= seed < 2**63:
        raise ConfigError(f"seed={seed} is more than 64 bits hold")
    values = {name: value for name, value in drawn.items() if value is not None}
    if beams and values:
        name, value = next(iter(values.items()))
        raise ConfigError(
            f"beams={beams} searches for the most probable text, {name}={value} samples one; use "
            "only one of them"
        )
    stops = (stop,) if isinstance(stop, str) and stop else tuple(stop)
    if "" in stops:
        raise ConfigError("stop= has an empty string, at which no text can end; leave it out")
    stops = tuple(plain_text.checked("stop", text) for text in stops)
    own = dataclasses.replace(sampling, **values) if values else None
    return WriteOptions(beams, own, max_tokens, seed, stops, special_tokens)


class Writer(abc.ABC):
    """Base class of objects that generate text with a model."""

    # Keeps the state after the text that a language model has read so far; None for other models.
    session: Session | None = None

    @abc.abstractmethod
    def __call__(self, prompt: str, options: WriteOptions) -> Iterator[str]:
        """Yields the text that continues a prompt, or that summarises it, piece by piece."""
