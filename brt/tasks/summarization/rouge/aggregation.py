"""Means of scores over documents, with bootstrap confidence intervals."""

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
    """The mean of a score over documents, with the bounds of its confidence interval."""

    low: Score
    mid: Score
    high: Score


def aggregate(scores: Sequence[Mapping[str, Score]]) -> dict[str, Aggregate]:
    """Returns the mean of each kind of score over documents, with its confidence interval.

    The intervals are estimated by the bootstrap: percentiles of the means of many samples of the
    documents, drawn with replacement. `Aggregate.mid` is the mean of the documents themselves. The
    BootstrapAggregator of the package rouge-score returns the median of the samples' means instead,
    which differs randomly in the second decimal of a percentage. Raises DataError if there are no
    documents.
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
