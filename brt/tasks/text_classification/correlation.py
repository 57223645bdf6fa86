"""How closely numbers go with others, -1 to 1; 0 where one of the two does not vary."""

import numpy as np
from jaxtyping import Float
from scipy import stats

Numbers = Float[np.ndarray, " N"]


def pearson(x: Numbers, y: Numbers) -> float:
    """Pearson's correlation."""
    return _defined(stats.pearsonr, x, y)


def spearman(x: Numbers, y: Numbers) -> float:
    """Spearman's: that of ranks, which equal numbers share."""
    return _defined(stats.spearmanr, x, y)


def _defined(correlation: object, x: Numbers, y: Numbers) -> float:
    x, y = (np.asarray(numbers, np.float64) for numbers in (x, y))
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return 0.0
    return float(correlation(x, y).statistic)
