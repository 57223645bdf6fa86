"""The interface of objects that generate text, and the options of a generated text."""

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
      stop: texts before the first of which the text ends.
      special_tokens: True reads the names of special tokens in the prompt as these tokens.
    """

    beams: int | None = None
    sampling: Sampling | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    special_tokens: bool = False


class Writer(abc.ABC):
    """Base class of objects that generate text with a model.

    Attributes:
      session: the session of a language model, which keeps the state after the text that was read
        so far; None for other models.
    """

    session: Session | None = None

    @abc.abstractmethod
    def __call__(self, prompt: str, options: WriteOptions) -> Iterator[str]:
        """Yields the text that continues a prompt, or that summarises it, piece by piece.

        Args:
          prompt: the prompt.
          options: options of the generated text.
        """
