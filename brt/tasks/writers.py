"""Text generation: the interface of generators and the options of a request."""

import abc
from collections.abc import Iterator
from typing import NamedTuple

from brt.config import Sampling
from brt.generation.session import Session


class WriteOptions(NamedTuple):
    """Options of a generated text; None selects the task's default.

    Attributes:
      beams: number of beams of a beam search; 1 is greedy decoding.
      sampling: settings for drawing tokens at random.
      max_tokens: maximum number of generated tokens.
      seed: seed of the random number generator.
    """

    beams: int | None = None
    sampling: Sampling | None = None
    max_tokens: int | None = None
    seed: int | None = None


class Writer(abc.ABC):
    """Generates texts with one set of parameters; compiles its programs once.

    Attributes:
      session: state of a language model that continues the text read so far; None for other models.
    """

    session: Session | None = None

    @abc.abstractmethod
    def __call__(self, prompt: str, options: WriteOptions) -> Iterator[str]:
        """Yields the text that continues or answers a prompt, piece by piece."""
