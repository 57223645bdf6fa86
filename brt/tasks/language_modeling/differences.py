"""Paired differences between two readings of the same documents, with confidence intervals."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from brt.formatting import counted

# With fewer documents, an interval over documents says little about other documents.
_ENOUGH = 10


class Difference(NamedTuple):
    """A difference in bits per unit (a byte or a token) between two readings of documents."""

    value: float
    half_width: float | None  # half of the 95 % confidence interval; None for a single document


def basis(documents: int) -> str:
    """Returns a line for the user that says on how many documents the intervals rest."""
    line = f"95 % intervals over {counted(documents, 'document')}"
    few = f"; fewer than {_ENOUGH} say little about other documents"
    return line + (few if documents < _ENOUGH else "")


def position_ranges(starts: Sequence[int], length: int) -> np.ndarray:
    """Returns for each position below `length` the index of the last start that is not above it."""
    return np.searchsorted(starts, np.arange(length), side="right") - 1


def paired_difference(nats: np.ndarray, other: np.ndarray, sizes: np.ndarray) -> Difference:
    """Returns the bits per unit of a reading of documents, minus those of another reading.

    `nats` and `other` have the nats of each document in both readings, and `sizes` its number of
    units. The difference is the ratio of two sums over documents. The interval uses Student's
    distribution and says how much the difference would vary with other documents of the same kind.
    """
    from scipy.special import stdtrit  # This import takes long.

    bits, count = (nats - other) / math.log(2), len(nats)
    value = float(bits.sum() / sizes.sum())
    if count < 2:
        return Difference(value, None)
    residuals = bits - value * sizes
    error = math.sqrt(count / (count - 1) * float(np.square(residuals).sum())) / float(sizes.sum())
    return Difference(value, float(stdtrit(count - 1, 0.975)) * error)
