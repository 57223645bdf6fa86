"""What becomes of features before a model reads them."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from brt.tasks.speech_recognition.data.utterances import Features, Utterance

SMALLEST_DEVIATION = 1e-5  # of a feature; one that never changes becomes 0


class Moments(NamedTuple):
    """Of each feature, in float64."""

    mean: Float[np.ndarray, " F"]
    deviation: Float[np.ndarray, " F"]


def moments(features: Features) -> Moments:
    """Of the frames of an utterance."""
    wide = features.astype(np.float64)
    return Moments(wide.mean(axis=0), wide.std(axis=0))


def speaker_moments(utterances: Iterable[Utterance]) -> dict[str, Moments]:
    """Of all frames of each speaker."""
    sums: dict[str, np.ndarray] = {}
    for utterance in utterances:
        wide = utterance.features.astype(np.float64)
        own = np.array([np.full(wide.shape[1], len(wide)), wide.sum(0), (wide**2).sum(0)])
        sums[utterance.speaker] = sums.get(utterance.speaker, 0) + own
    found = {}
    for speaker, (count, total, squares) in sums.items():
        mean = total / np.maximum(count, 1)
        variance = np.maximum(squares / np.maximum(count, 1) - mean**2, 0)
        found[speaker] = Moments(mean, np.sqrt(variance))
    return found


def normalized(features: Features, by: Moments) -> Features:
    """Mean 0 and deviation 1; 0 where a feature does not change."""
    scale = np.where(by.deviation > SMALLEST_DEVIATION, by.deviation, np.inf)
    return ((features - by.mean) / scale).astype(np.float32)


def stacked(features: Features, stack: int, stride: int) -> Float[np.ndarray, "kept width"]:
    """Every `stride`-th frame, with the `stack` - 1 behind it beside it; zeros behind the last."""
    count = -(-len(features) // stride)
    padded = np.pad(features, ((0, stack), (0, 0)))
    return np.concatenate([padded[i:][: count * stride : stride] for i in range(stack)], axis=1)


def needed(tokens: list[str]) -> int:
    """Frames that CTC needs: one for each token, and a blank between equal neighbours."""
    return len(tokens) + sum(a == b for a, b in zip(tokens, tokens[1:], strict=False))
