"""Utterances before (`Recording`) and after (`Utterance`) their features are read.

The modules that read the different kinds of files yield recordings. Short recordings of the same
speaker can be concatenated (Speech.join). Features are normalised and frames stacked before a model
reads them. In shapes, X is the number of frames of an utterance and F the number of features of a
frame.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from brt.errors import DataError

Features = Float[np.ndarray, "X F"]
# A feature whose standard deviation is below this bound counts as constant and becomes 0.
SMALLEST_DEVIATION = 1e-5


class Utterance(NamedTuple):
    """An utterance: the features of spoken text, and its transcript."""

    file: str  # name of the file, for messages
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
    # Returns the features [X, F], as numbers of any type, and the sample rate in Hz (0 if the file
    # contains features instead of sound). Raises DataError if the file is invalid.
    load: Callable[[], tuple[np.ndarray, int]]

    def read(self) -> Utterance:
        """Reads the features, and returns the utterance with single spaces between words.

        Raises DataError if the file is invalid, or a feature is not finite.
        """
        features, rate = self.load()
        features = np.asarray(features, np.float32)
        if not np.isfinite(features).all():
            raise DataError(f"the features of {self.id} in {self.file} are not all finite")
        words = " ".join(self.transcript.split())
        return Utterance(self.file, self.id, self.speaker, words, features, rate)


class Moments(NamedTuple):
    """Mean and standard deviation of each feature over some frames."""

    mean: Float[np.ndarray, " F"]
    deviation: Float[np.ndarray, " F"]


def moments(features: Features) -> Moments:
    wide = features.astype(np.float64)
    return Moments(wide.mean(axis=0), wide.std(axis=0))


def speaker_moments(utterances: Iterable[Utterance]) -> dict[str, Moments]:
    """Returns the moments over all frames of each speaker, by the name of the speaker."""
    sums: dict[str, np.ndarray] = {}
    for utterance in utterances:
        wide = utterance.features.astype(np.float64)
        sums_of_one = np.array([np.full(wide.shape[1], len(wide)), wide.sum(0), (wide**2).sum(0)])
        sums[utterance.speaker] = sums.get(utterance.speaker, 0) + sums_of_one
    by_speaker = {}
    for speaker, (count, total, squares) in sums.items():
        mean = total / np.maximum(count, 1)
        variance = np.maximum(squares / np.maximum(count, 1) - mean**2, 0)
        by_speaker[speaker] = Moments(mean, np.sqrt(variance))
    return by_speaker


def normalize(features: Features, by: Moments) -> Features:
    """Returns features minus their mean, divided by their deviation; constant features become 0."""
    scale = np.where(by.deviation > SMALLEST_DEVIATION, by.deviation, np.inf)
    return ((features - by.mean) / scale).astype(np.float32)


def stack_frames(features: Features, stack: int) -> Float[np.ndarray, "frames width"]:
    """Concatenates consecutive frames to stacked frames, [ceil(X / stack), stack * F].

    If X is not a multiple of `stack`, the rest of the last stacked frame is zeros.
    """
    padded = np.pad(features, ((0, -len(features) % stack), (0, 0)))
    return padded.reshape(-1, stack * features.shape[1])


def frames_needed(tokens: list[str]) -> int:
    """Returns the smallest number of frames in which CTC can emit a sequence of tokens.

    Each token needs a frame, and a blank between two equal neighbours needs a frame, too.
    """
    return len(tokens) + sum(a == b for a, b in zip(tokens, tokens[1:], strict=False))


Check = Callable[[Utterance], None]


def join_recordings(
    recordings: Iterable[Recording], count: int, *, orders: int = 1, check: Check
) -> Iterator[Recording]:
    """Yields recordings, each of which joins `count` of the given recordings of one speaker.

    The last joined recording of a speaker may consist of fewer recordings. The given recordings are
    first shuffled with a fixed seed, because consecutive lines of a table often have recordings of
    the same word by the same speaker. All recordings are used `orders` times, each time in another
    order, so that a model does not memorise which recordings follow each other. `check` is called
    with each given recording after its features have been read, and may raise an error.
    """
    single = list(recordings)
    for order in range(orders):
        mixed = [single[i] for i in np.random.default_rng(order).permutation(len(single))]
        mixed.sort(key=lambda recording: recording.speaker)
        for _, group in itertools.groupby(mixed, key=lambda recording: recording.speaker):
            by_speaker = list(group)
            for start in range(0, len(by_speaker), count):
                yield _join(by_speaker[start : start + count], order, check)


def _join(parts: Sequence[Recording], order: int, check: Check) -> Recording:
    def load() -> tuple[np.ndarray, int]:
        loaded = [part.read() for part in parts]
        if len(kinds := {(part.features.shape[1], part.rate) for part in loaded}) > 1:
            raise DataError(
                f"Speech.join cannot put {parts[0].id} and the {len(parts) - 1} after it together: "
                f"their features and sample rates differ ({sorted(kinds)})"
            )
        for part in loaded:
            check(part)
        return np.concatenate([part.features for part in loaded]), loaded[0].rate

    first, words = parts[0], (part.transcript for part in parts)
    name = f"{first.id}+{len(parts) - 1}" + (f"/{order}" if order else "")
    return Recording(first.file, name, first.speaker, " ".join(words), load)
