from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt.ops.reductions import add_tile, scale_last, sum_leading

X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 4)), jnp.float32)
SMALL = jnp.array([1.0, -2.0, 3.0, 0.5])


@pytest.mark.parametrize("axes", [1, 2])
def test_sum_leading_is_the_sum(axes: int) -> None:
    expected = np.asarray(X, np.float64).sum(axis=tuple(range(axes)))
    np.testing.assert_allclose(sum_leading(X, axes), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("fast", "plain"),
    [(add_tile, lambda x, y: x + y[None, None]), (scale_last, lambda x, y: x * y[None, None])],
)
def test_values_and_gradients_are_those_of_the_plain_form(fast: Callable, plain: Callable) -> None:
    def value_and_grad(f: Callable) -> tuple:
        return jax.value_and_grad(lambda x, y: jnp.sum(f(x, y) ** 2), argnums=(0, 1))(X, SMALL)

    np.testing.assert_array_equal(fast(X, SMALL), plain(X, SMALL))
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5),
        value_and_grad(fast), value_and_grad(plain),
    )  # fmt: skip
