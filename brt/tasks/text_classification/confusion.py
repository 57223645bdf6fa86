"""How often each label is taken for which: accuracy, F1, Matthews correlation."""

import numpy as np
from jaxtyping import Int

from brt.data.chunks import Ids

Confusion = Int[np.ndarray, "true guessed"]


def confusion(true: Ids, guessed: Ids, labels: int) -> Confusion:
    """int64 [labels, labels], how many rows of a label were given which one."""
    table = np.zeros((labels, labels), np.int64)
    np.add.at(table, (np.asarray(true, int), np.asarray(guessed, int)), 1)
    return table


def accuracy(table: Confusion) -> float:
    """The share of rows that are given their own label; 0 of none."""
    return float(np.trace(table) / max(table.sum(), 1))


def f1(table: Confusion, label: int = 1) -> float:
    """Of one label: 2 hits / (rows of it + guesses of it), 0 without either."""
    both = table[label].sum() + table[:, label].sum()
    return float(2 * table[label, label] / both) if both else 0.0


def matthews(table: Confusion) -> float:
    """Matthews' correlation, for more than two labels after Gorodkin (2004, eq. 8).

    0 where all rows have one label, or are given one.
    """
    true, guessed, total = table.sum(axis=1), table.sum(axis=0), int(table.sum())
    covariance = total * int(np.trace(table)) - int(true @ guessed)
    spread = (total**2 - int(true @ true)) * (total**2 - int(guessed @ guessed))
    return covariance / spread**0.5 if spread else 0.0
