"""Classes for utterances before (`Recording`) and after (`Utterance`) their features are read.

The modules that read the different kinds of files yield recordings.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from brt.errors import DataError

Features = Float[np.ndarray, "X F"]


class Utterance(NamedTuple):
    """An utterance: the features of spoken text, and its transcript."""

    file: str  # for messages
    id: str
    speaker: str  # "" if unknown
    transcript: str
    features: Features  # F features of each of X frames; X may be 0
    rate: int = 0  # sample rate of the wav file in Hz; 0 if features were read instead


class Recording(NamedTuple):
    """An utterance whose features have not been read yet."""

    file: str
    id: str
    speaker: str
    transcript: str
    # Reads the features [X, F], numbers of any type, and the sample rate in Hz or 0. Raises
    # DataError if the file is invalid.
    load: Callable[[], tuple[np.ndarray, int]]

    def read(self) -> Utterance:
        """Reads the features; spaces in the transcript are normalised.

        Raises DataError if the file is invalid, or a feature is not finite.
        """
        features, rate = self.load()
        features = np.asarray(features, np.float32)
        if not np.isfinite(features).all():
            raise DataError(f"the features of {self.id} in {self.file} are not all finite")
        words = " ".join(self.transcript.split())
        return Utterance(self.file, self.id, self.speaker, words, features, rate)
