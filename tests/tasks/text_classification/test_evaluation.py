"""Tests accuracy, F1, and correlation coefficients against their definitions."""

import numpy as np
import pytest

from brt.tasks.text_classification import task


def test_two_labels_by_hand():
    true, guessed = [1] * 10 + [0] * 10, [1] * 6 + [0] * 4 + [1] * 3 + [0] * 7
    table = task.confusion(true, guessed, 2)
    assert table.tolist() == [[7, 3], [4, 6]]
    assert task.accuracy(table) == pytest.approx(13 / 20)
    assert task.f1(table) == pytest.approx(2 * (6 / 9) * 0.6 / (6 / 9 + 0.6))
    wanted = (6 * 7 - 3 * 4) / np.sqrt(9 * 10 * 10 * 11)
    assert task.matthews(table) == pytest.approx(wanted)
    assert task.matthews(table) == pytest.approx(np.corrcoef(true, guessed)[0, 1])


def test_more_labels_are_correlated_as_vectors():
    rng = np.random.default_rng(0)
    true, guessed = rng.integers(0, 4, 200), rng.integers(0, 4, 200)
    guessed[:80] = true[:80]
    one_hot = [np.eye(4)[x] - np.eye(4)[x].mean(axis=0) for x in (true, guessed)]
    pairs = [(one_hot[0], one_hot[1]), (one_hot[0], one_hot[0]), (one_hot[1], one_hot[1])]
    covariance = [(a * b).sum() for a, b in pairs]
    wanted = covariance[0] / np.sqrt(covariance[1] * covariance[2])
    assert task.matthews(task.confusion(true, guessed, 4)) == pytest.approx(wanted)


def test_nothing_to_correlate_is_zero():
    always = task.confusion([0, 1, 1], [1, 1, 1], 2)
    assert task.matthews(always) == 0 and task.f1(always, 0) == 0
    none = task.confusion([], [], 2)
    assert (task.accuracy(none), task.f1(none), task.matthews(none)) == (0, 0, 0)
    assert task.matthews(task.confusion([0, 1], [0, 1], 2)) == 1
    assert task.matthews(task.confusion([0, 1], [1, 0], 2)) == -1


def test_pearson_is_numpys_and_nothing_without_variation() -> None:
    x, y = np.random.default_rng(0).normal(size=(2, 50)).astype(np.float32)
    y += x
    assert task.pearson(x, y) == pytest.approx(np.corrcoef(x, y)[0, 1])
    assert task.pearson(x, 3 - 2 * x) == pytest.approx(-1)
    assert task.pearson(x, np.ones(50)) == 0


def test_spearman_sees_order_alone() -> None:
    x = np.array([0.5, 2.0, 2.0, 7.0, 1.0])
    assert task.spearman(x, np.exp(x)) == pytest.approx(1)
    y = np.array([1.0, 3.0, 2.0, 2.0, 0.0])
    wanted = np.corrcoef([1, 3.5, 3.5, 5, 2], [2, 5, 3.5, 3.5, 1])[0, 1]
    assert task.spearman(x, y) == pytest.approx(wanted)
