"""Utterances and recordings, which all readers of speech yield."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from brt.errors import DataError

Features = Float[np.ndarray, "X F"]


class Utterance(NamedTuple):
    """Features of an utterance, and its transcript.

    Attributes:
      file: file of the utterance, for messages.
      id: name of the utterance.
      speaker: name of the speaker; "" if unknown.
      transcript: the spoken words.
      features: float32 [X, F], F features of each of X frames; X may be 0.
      rate: sample rate of the wav file in Hz; 0 if a file of features was read.
    """

    file: str
    id: str
    speaker: str
    transcript: str
    features: Features
    rate: int = 0


class Recording(NamedTuple):
    """An utterance whose features have not been read yet.

    Attributes:
      file, id, speaker, transcript: see `Utterance`.
      load: function that returns features [X, F] of any float type, and the sample rate or 0. It
        raises DataError if the file is invalid.
    """

    file: str
    id: str
    speaker: str
    transcript: str
    load: Callable[[], tuple[np.ndarray, int]]

    def read(self) -> Utterance:
        """Returns the utterance with its features; raises DataError if they are not finite."""
        features, rate = self.load()
        features = np.asarray(features, np.float32)
        if not np.isfinite(features).all():
            raise DataError(f"the features of {self.id} in {self.file} are not all finite")
        words = " ".join(self.transcript.split())
        return Utterance(self.file, self.id, self.speaker, words, features, rate)
