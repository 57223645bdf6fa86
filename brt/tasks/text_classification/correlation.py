"""Correlations of two series of numbers, from -1 to 1.

A correlation is 0 if one of the series is constant or has fewer than two numbers.
"""

import numpy as np
import scipy
from jaxtyping import Float

Numbers = Float[np.ndarray, " N"]


def pearson(x: Numbers, y: Numbers) -> float:
    return float(scipy.stats.pearsonr(*_exact(x, y)).statistic) if _vary(x, y) else 0.0


def spearman(x: Numbers, y: Numbers) -> float:
    """Returns Spearman's rank correlation; equal numbers share a rank."""
    return float(scipy.stats.spearmanr(x, y).statistic) if _vary(x, y) else 0.0


def _exact(*numbers: Numbers) -> list[np.ndarray]:
    return [np.asarray(x, np.float64) for x in numbers]


def _vary(*numbers: Numbers) -> bool:
    return all(len(x) > 1 and bool(np.ptp(x)) for x in numbers)
