from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt.ops.reductions import add_shared, scale_shared, sequential_sum, sum_last, sum_leading

X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 4)), jnp.float32)


@pytest.mark.parametrize("axes", [1, 2])
def test_sum_leading_is_the_sum(axes: int) -> None:
    expected = np.asarray(X, np.float64).sum(axis=tuple(range(axes)))
    for found in (sum_leading(X, axes), sequential_sum(X, axes)):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("width", [5, 64, 96, 256, 264, 2048])
def test_sum_last_is_the_sum(width: int) -> None:
    x = np.random.default_rng(0).normal(size=(3, width)).astype(np.float32)
    error = sum_last(jnp.asarray(x)) - x.astype(np.float64).sum(axis=-1, keepdims=True)
    assert np.max(np.abs(error)) <= 1e-6 * np.max(np.abs(x).sum(axis=-1))


@pytest.mark.slow_cases("shape1")
@pytest.mark.parametrize("shape", [(4,), (3, 4)])
def test_what_is_shared_by_leading_axes_has_the_usual_gradients(shape: tuple[int, ...]) -> None:
    shared = jnp.asarray(np.random.default_rng(1).normal(size=shape), jnp.float32)

    def gradients(operation: Callable) -> tuple[jax.Array, ...]:
        of_both = jax.grad(lambda *a: jnp.sum(jnp.sin(operation(*a))), argnums=(0, 1))
        return jax.jit(of_both)(X, shared)

    for own, plain in ((add_shared, jnp.add), (scale_shared, jnp.multiply)):
        jax.tree.map(
            partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6),
            gradients(own), gradients(lambda x, y: plain(x, jnp.broadcast_to(y, x.shape))),  # noqa: B023
        )  # fmt: skip
