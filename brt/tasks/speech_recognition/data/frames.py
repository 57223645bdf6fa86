"""Normalises the features of utterances and stacks frames, before a model reads them.

In shapes, X is the number of frames of an utterance and F the number of features of a frame.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from brt.tasks.speech_recognition.data.utterances import Features, Utterance

# A feature whose standard deviation is below this bound counts as constant and becomes 0.
SMALLEST_DEVIATION = 1e-5


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


def stack_frames(features: Features, stack: int, stride: int) -> Float[np.ndarray, "frames width"]:
    """Concatenates consecutive frames to stacked frames, [ceil(X / stride), stack * F].

    Stacked frame i consists of the frames i * stride, ..., i * stride + stack - 1. Frames after the
    end of the utterance are zeros. A stride above 1 shortens the utterance.
    """
    count = -(-len(features) // stride)
    padded = np.pad(features, ((0, stack), (0, 0)))
    return np.concatenate([padded[i:][: count * stride : stride] for i in range(stack)], axis=1)


def frames_needed(tokens: list[str]) -> int:
    """Returns the smallest number of frames in which CTC can emit a sequence of tokens.

    Each token needs a frame, and a blank between two equal neighbours needs a frame, too.
    """
    return len(tokens) + sum(a == b for a, b in zip(tokens, tokens[1:], strict=False))
