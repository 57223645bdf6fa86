"""One number for many documents, and how far it can be trusted."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from brt.errors import DataError
from brt.tasks.summarization.rouge.scores import Score

SAMPLES, SEED, CONFIDENCE = 1000, 0, 0.95
TEXT = (
    f"mean over documents, {CONFIDENCE:.0%} interval of it from {SAMPLES} bootstrap samples, "
    f"seed {SEED}"
)


class Aggregate(NamedTuple):
    """Means over documents; `low` and `high` bound those of resampled documents."""

    low: Score
    mid: Score
    high: Score


def aggregate(scores: Sequence[Mapping[str, Score]]) -> dict[str, Aggregate]:
    """The figures of many documents, by the name of the score.

    `mid` is the mean itself; rouge-score's BootstrapAggregator gives the median of the resampled
    means, which differs by chance, in the second decimal of a percentage.

    Raises:
      DataError: there are no scores.
    """
    if not scores:
        raise DataError("there are no summaries to score: the split has no documents")
    names = list(scores[0])
    values = np.array([[document[name] for name in names] for document in scores])
    rng = np.random.default_rng(SEED)
    means = np.stack(
        [values[rng.integers(len(values), size=len(values))].mean(axis=0) for _ in range(SAMPLES)]
    )
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means, [tail, 1 - tail], axis=0)
    mid = values.mean(axis=0)
    return {
        name: Aggregate(*(Score(*map(float, bound[i])) for bound in (low, mid, high)))
        for i, name in enumerate(names)
    }
