"""How closely numbers go with others, -1 to 1; 0 where one of the two does not vary."""

import numpy as np
import scipy
from jaxtyping import Float

Numbers = Float[np.ndarray, " N"]


def pearson(x: Numbers, y: Numbers) -> float:
    """Pearson's correlation."""
    return float(scipy.stats.pearsonr(*_exact(x, y)).statistic) if _vary(x, y) else 0.0


def spearman(x: Numbers, y: Numbers) -> float:
    """Spearman's: that of ranks, which equal numbers share."""
    return float(scipy.stats.spearmanr(x, y).statistic) if _vary(x, y) else 0.0


def _exact(*numbers: Numbers) -> list[np.ndarray]:
    return [np.asarray(x, np.float64) for x in numbers]


def _vary(*numbers: Numbers) -> bool:
    return all(len(x) > 1 and bool(np.ptp(x)) for x in numbers)
