"""Paired differences between evaluations of the same documents, with confidence intervals."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from brt.formatting import counted

# An interval over fewer documents than this says little about other documents.
_ENOUGH = 10


class Difference(NamedTuple):
    """A difference in bits per unit (a byte or a token) between two evaluations of documents."""

    value: float
    half_width: float | None  # half of the 95 % confidence interval; None for a single document


def basis(documents: int) -> str:
    """Returns a line for the user that says on how many documents the intervals rest."""
    line = f"95 % intervals over {counted(documents, 'document')}"
    few = f"; fewer than {_ENOUGH} say little about other documents"
    return line + (few if documents < _ENOUGH else "")


def position_ranges(starts: Sequence[int], length: int) -> np.ndarray:
    """Returns the index of the range that contains each position below `length`.

    `starts` has the first position of each range.
    """
    return np.searchsorted(starts, np.arange(length), side="right") - 1


def paired_difference(nats: np.ndarray, other: np.ndarray, sizes: np.ndarray) -> Difference:
    """Returns the difference in bits per unit between two evaluations of the same documents.

    `nats` has the nats of each document in one evaluation, `other` has those in the other
    evaluation, which are subtracted, and `sizes` has the number of units of each document. Nats and
    units are summed over documents before the division. The interval uses Student's distribution
    and says how much the difference would vary with other documents of the same kind.
    """
    return difference_of_runs(nats[None], other[None], sizes)


def difference_of_runs(
    nats: Float[np.ndarray, "R N"], other: Float[np.ndarray, "S N"], sizes: np.ndarray
) -> Difference:
    """Returns the `paired_difference` between the mean of R and the mean of S other training runs.

    `nats` and `other` have the nats of N documents in each run. With several runs, the interval
    also says how much the difference would vary with other seeds. For this purpose, the variance
    over documents and the variances of both means over runs are added up. The degrees of freedom of
    the sum are those of Welch (1947) and Satterthwaite (1946).
    """
    from scipy.special import stdtrit  # This import takes long.

    bits, count = (nats.mean(0) - other.mean(0)) / math.log(2), len(sizes)
    value = float(bits.sum() / sizes.sum())
    if count < 2:
        return Difference(value, None)
    residuals = bits - value * sizes
    variances = [count / (count - 1) * float(np.square(residuals).sum()) / float(sizes.sum()) ** 2]
    freedom = [count - 1]
    for runs in (nats, other):
        if len(runs) > 1:
            of_runs = runs.sum(1) / math.log(2) / sizes.sum()
            variances.append(float(of_runs.var(ddof=1)) / len(runs))
            freedom.append(len(runs) - 1)
    total = sum(variances)
    parts = sum((one / total) ** 2 / n for one, n in zip(variances, freedom, strict=True) if one)
    return Difference(value, float(stdtrit(1 / parts, 0.975)) * math.sqrt(total) if parts else 0.0)
