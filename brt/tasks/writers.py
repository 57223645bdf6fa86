"""What writes texts, and how a text may be asked for."""

import abc
from collections.abc import Iterator
from typing import NamedTuple

from brt.config import Sampling
from brt.generation.session import Session


class WriteOptions(NamedTuple):
    """How a text is to be written; None: as the task usually does.

    Attributes:
      beams: search with so many beams; 1: greedily.
      sampling: draw tokens so.
      max_tokens: of the text.
    """

    beams: int | None = None
    sampling: Sampling | None = None
    max_tokens: int | None = None
    seed: int | None = None


class Writer(abc.ABC):
    """Writes texts with one set of parameters; what that needs is compiled once.

    Attributes:
      session: the memory of a text that goes on from what was read; None: there is none.
    """

    session: Session | None = None

    @abc.abstractmethod
    def __call__(self, prompt: str, options: WriteOptions) -> Iterator[str]:
        """What comes after, or is made of, a prompt, piece by piece."""
