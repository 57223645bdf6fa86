"""What a reader of speech finds, whatever the files."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from brt.errors import DataError

Features = Float[np.ndarray, "X F"]


class Utterance(NamedTuple):
    """Features of a piece of speech, and what was said.

    Attributes:
      file: that it comes from, as messages name it.
      speaker: "" where nobody says who it was.
      features: float32 [X, F]; X may be 0.
      rate: samples a second of the wav file; 0 where features were read.
    """

    file: str
    id: str
    speaker: str
    transcript: str
    features: Features
    rate: int = 0


class Recording(NamedTuple):
    """An utterance whose features are not read yet.

    Attributes:
      load: () -> features [X, F] of any float type, and the rate of the samples or 0; raises
        DataError where the file is not as it should be.
    """

    file: str
    id: str
    speaker: str
    transcript: str
    load: Callable[[], tuple[np.ndarray, int]]

    def read(self) -> Utterance:
        """Raises DataError for features that are no frames of finite numbers."""
        features, rate = self.load()
        features = np.asarray(features, np.float32)
        if not np.isfinite(features).all():
            raise DataError(f"the features of {self.id} in {self.file} are not all finite")
        words = " ".join(self.transcript.split())
        return Utterance(self.file, self.id, self.speaker, words, features, rate)
