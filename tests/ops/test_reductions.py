import jax.numpy as jnp
import numpy as np
import pytest

from brt.ops.reductions import sum_leading

X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 4)), jnp.float32)


@pytest.mark.parametrize("axes", [1, 2])
def test_sum_leading_is_the_sum(axes: int) -> None:
    expected = np.asarray(X, np.float64).sum(axis=tuple(range(axes)))
    np.testing.assert_allclose(sum_leading(X, axes), expected, rtol=1e-6)
