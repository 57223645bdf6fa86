"""The interface of objects that generate text, the options of a text, and its stop strings."""

import abc
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from brt.config import Sampling
from brt.data import plain_text
from brt.errors import ConfigError
from brt.generation.session import Session

# A text, or the messages of a conversation, which the tokenizer's chat template converts to a text.
Prompt = str | Sequence[Mapping[str, Any]]


class WriteOptions(NamedTuple):
    """Options of a generated text; None selects the task's default."""

    beams: int | None = None  # number of beams of a beam search; 1 is greedy decoding
    sampling: Sampling | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()  # the text ends before the first of these strings that occurs
    # True if names of special tokens in the prompt stand for these tokens, not for ordinary text.
    special_tokens: bool = False


def write_options(
    sampling: Sampling, *, beams: int | None = None, max_tokens: int | None = None, seed: int = 0,
    stop: str | Sequence[str] = (), special_tokens: bool = False, **drawn: float | None,
) -> WriteOptions:  # fmt: skip
    """Returns the options of a text that a user asks for, as described in `WriteOptions`.

    `drawn` has new values for settings in `sampling`; None keeps the value of a setting. Raises
    ConfigError if an option is out of its range or contradicts another one, and DataError if a stop
    string is not valid text.
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
    def __call__(self, prompt: Prompt, options: WriteOptions) -> Iterator[str]:
        """Yields a text that continues or summarises a prompt, piece by piece."""

    def each(self, prompts: Sequence[Prompt], options: WriteOptions) -> Iterator[str]:
        """Yields the whole generated text for each prompt, in the order of the prompts.

        The text for a prompt does not depend on the other prompts.
        """
        return ("".join(self(prompt, options)) for prompt in prompts)


class StopFilter:
    """Receives a text in pieces, and ends it before the stop string that is complete first.

    If several stop strings are complete at the same character, the text ends before the longest of
    them. The result does not depend on how the text is divided into pieces. Stop strings must not
    be empty. `found` is True once the text has ended at a stop string.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops, self._held, self.found = tuple(stops), "", False

    def add(self, piece: str, *, final: bool = False) -> str:
        """Takes the next piece; returns the further characters that belong to no stop string.

        Characters at the end that may be the beginning of a stop string are held back until a later
        call. `final` is True for the last piece, of which nothing is held back.
        """
        text = self._held + piece
        places = [(text.find(stop) + len(stop), -len(stop)) for stop in self._stops if stop in text]
        if places:
            self.found = True
            return text[: sum(min(places))]
        held = 0 if final else max((_overlap(text, stop) for stop in self._stops), default=0)
        cut = len(text) - held
        self._held = text[cut:]
        return text[:cut]


def _overlap(text: str, stop: str) -> int:
    """Returns how many characters at the end of `text` are the beginning of `stop`."""
    return next((n for n in range(len(stop) - 1, 0, -1) if text.endswith(stop[:n])), 0)
