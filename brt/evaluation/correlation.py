"""How closely numbers go with others: Pearson's and Spearman's correlation."""

import numpy as np
from jaxtyping import Float

Numbers = Float[np.ndarray, " N"]


def pearson(x: Numbers, y: Numbers) -> float:
    """Of the numbers, -1 to 1; 0 where one of the two does not vary."""
    x, y = (np.asarray(numbers, np.float64) for numbers in (x, y))
    x, y = x - x.mean(), y - y.mean()
    spread = np.sqrt((x @ x) * (y @ y))
    return float(x @ y / spread) if spread else 0.0


def spearman(x: Numbers, y: Numbers) -> float:
    """Of their ranks, which equal numbers share."""
    return pearson(ranks(x), ranks(y))


def ranks(x: Numbers) -> Numbers:
    """From 1 upwards in float64; of equal numbers the mean of theirs."""
    _, places, counts = np.unique(x, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[places]
