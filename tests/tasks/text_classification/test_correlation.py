"""Compares correlations with NumPy's and with ranks that are counted one by one."""

import numpy as np
import pytest

from brt.tasks.text_classification import evaluation


def test_pearson_is_numpys_and_nothing_without_variation() -> None:
    x, y = np.random.default_rng(0).normal(size=(2, 50)).astype(np.float32)
    y += x
    assert evaluation.pearson(x, y) == pytest.approx(np.corrcoef(x, y)[0, 1])
    assert evaluation.pearson(x, 3 - 2 * x) == pytest.approx(-1)
    assert evaluation.pearson(x, np.ones(50)) == 0


def test_spearman_sees_order_alone() -> None:
    x = np.array([0.5, 2.0, 2.0, 7.0, 1.0])
    assert evaluation.spearman(x, np.exp(x)) == pytest.approx(1)
    y = np.array([1.0, 3.0, 2.0, 2.0, 0.0])
    wanted = np.corrcoef([1, 3.5, 3.5, 5, 2], [2, 5, 3.5, 3.5, 1])[0, 1]
    assert evaluation.spearman(x, y) == pytest.approx(wanted)
