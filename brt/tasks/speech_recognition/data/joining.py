"""Long utterances from short ones: what a speaker said, one recording after another."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from brt.errors import DataError
from brt.tasks.speech_recognition.data.utterances import Recording, Utterance

Check = Callable[[Utterance], None]


def joined(
    recordings: Iterable[Recording], count: int, *, orders: int = 1, check: Check
) -> Iterator[Recording]:
    """So many recordings of a speaker become one; what is left of each, a shorter one.

    Their order is mixed, always in the same way: tables often list the same word by the same
    speaker line after line.

    Args:
      orders: so many times, in another order each: a model that hears few utterances often
        learns by heart what follows what.
      check: of every recording when it is read; raises where it may not be used.
    """
    found = list(recordings)
    for order in range(orders):
        mixed = [found[i] for i in np.random.default_rng(order).permutation(len(found))]
        mixed.sort(key=lambda recording: recording.speaker)
        for _, group in itertools.groupby(mixed, key=lambda recording: recording.speaker):
            own = list(group)
            for start in range(0, len(own), count):
                yield _one(own[start : start + count], order, check)


def _one(parts: Sequence[Recording], order: int, check: Check) -> Recording:
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
