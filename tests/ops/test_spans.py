"""Compares the best spans and their losses with loops over all starts and ends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt.ops.spans import best_spans, span_nats


def searched(logits, allowed, longest):
    """Returns (start, end, score) of the best span of each row, found by trying all spans."""
    found = []
    for row, there in zip(logits, allowed, strict=True):
        spans = [
            (row[i, 0] + row[j, 1], -i, -j)
            for i in range(len(row))
            for j in range(i, min(i + longest, len(row)))
            if there[i] and there[j]
        ]
        score, i, j = max(spans, default=(np.finfo(np.float32).min, 0, 0))
        found.append((-i, -j, score))
    return found


@pytest.mark.parametrize("longest", [1, 3, 50])
def test_the_best_span_is_that_of_a_search(longest):
    rng = np.random.default_rng(longest)
    logits = rng.integers(-4, 5, (40, 12, 2)).astype(np.float32)  # Many spans are equally good.
    first, length = rng.integers(0, 12, 40), rng.integers(0, 13, 40)
    places = np.arange(12)
    allowed = (places >= first[:, None]) & (places < (first + length)[:, None])
    found = jax.jit(best_spans, static_argnums=2)(logits, allowed, longest)
    wanted = searched(logits, allowed, longest)
    for row in np.flatnonzero(allowed.any(axis=1)):
        assert (found.start[row], found.end[row], found.score[row]) == wanted[row]
    lowest = np.finfo(np.float32).min
    assert (np.asarray(found.score)[~allowed.any(axis=1)] == lowest).all()


def test_nats_are_those_of_two_softmaxes():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, 7, 2)).astype(np.float32)
    logits[:, 5:] = np.finfo(np.float32).min  # padding
    targets = np.array([[0, 0], [1, 4], [3, 2]], np.int32)
    scored = np.array([[True, True], [True, True], [False, False]])
    found = np.asarray(span_nats(*map(jnp.asarray, (logits, targets, scored))))
    p = np.exp(logits[:, :5].astype(np.float64))
    p /= p.sum(axis=1, keepdims=True)
    for row in range(2):
        for side in range(2):
            assert found[row, side] == pytest.approx(
                -np.log(p[row, targets[row, side], side]), rel=1e-5
            )
    assert not found[2].any()
