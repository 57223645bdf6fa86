"""Concatenates short recordings of the same speaker to longer utterances (Speech.join)."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from brt.errors import DataError
from brt.tasks.speech_recognition.data.utterances import Recording, Utterance

Check = Callable[[Utterance], None]


def join_recordings(
    recordings: Iterable[Recording], count: int, *, orders: int = 1, check: Check
) -> Iterator[Recording]:
    """Yields recordings that consist of `count` (at the end fewer) recordings of the same speaker.

    The recordings are first shuffled with a fixed seed, because tables often list the same word by
    the same speaker in consecutive lines. All recordings are used `orders` times, each time in
    another order; otherwise a model would memorise which recordings follow each other. `check` is
    called with each original recording once its features have been read, and may raise an error.
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
        if len(kinds := {(one.features.shape[1], one.rate) for one in loaded}) > 1:
            raise DataError(
                f"Speech.join cannot put {parts[0].id} and the {len(parts) - 1} after it together: "
                f"their features and sample rates differ ({sorted(kinds)})"
            )
        for one in loaded:
            check(one)
        return np.concatenate([one.features for one in loaded]), loaded[0].rate

    first, words = parts[0], (part.transcript for part in parts)
    name = f"{first.id}+{len(parts) - 1}" + (f"/{order}" if order else "")
    return Recording(first.file, name, first.speaker, " ".join(words), load)
