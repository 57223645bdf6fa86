"""Confusion matrices and the metrics computed from them: accuracy, F1, Matthews correlation."""

import numpy as np
from jaxtyping import Int

from brt.data.chunks import Ids

Confusion = Int[np.ndarray, "true guessed"]


def confusion(true: Ids, guessed: Ids, labels: int) -> Confusion:
    """Returns the number of rows with each pair of true and predicted label."""
    table = np.zeros((labels, labels), np.int64)
    np.add.at(table, (np.asarray(true, int), np.asarray(guessed, int)), 1)
    return table


def accuracy(table: Confusion) -> float:
    """Returns the fraction of rows whose label was predicted correctly; 0 if there are no rows."""
    return float(np.trace(table) / max(table.sum(), 1))


def f1(table: Confusion, label: int = 1) -> float:
    """Returns the F1 score of one label, from 0 to 1; 0 if it neither occurs nor is predicted."""
    both = table[label].sum() + table[:, label].sum()
    return float(2 * table[label, label] / both) if both else 0.0


def matthews(table: Confusion) -> float:
    """Returns the Matthews correlation, generalised to several labels by Gorodkin (2004, eq. 8).

    The result is from -1 to 1, and 0 if all rows have the same label or the same prediction.
    """
    true, guessed, total = table.sum(axis=1), table.sum(axis=0), int(table.sum())
    covariance = total * int(np.trace(table)) - int(true @ guessed)
    scale = (total**2 - int(true @ true)) * (total**2 - int(guessed @ guessed))
    return covariance / scale**0.5 if scale else 0.0
