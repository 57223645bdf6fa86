"""Tests that the kernel of a norm with a residual connection equals the derivatives of JAX."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt.ops import dispatch
from brt.ops.normalization import EPSILON
from brt.ops.residual_norm import residual_norm
from brt.ops.residual_norm.api import OP

V4 = SimpleNamespace(device_kind="TPU v4")
# The errors are relative to the largest number of an array.
TOLERANCE = {"float32": 5e-6, "bfloat16": 1e-2}
EPSILONS = [EPSILON, 0.3]


def some(*shape: int, seed: int, dtype: str = "float32") -> jax.Array:
    """Returns a random array."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def results(
    x: jax.Array, scale: jax.Array, epsilon: float, weights: list[jax.Array], name: str
) -> tuple:
    """Returns the results of an implementation and the gradients of their weighted sum."""

    def both(x: jax.Array, scale: jax.Array) -> tuple:
        return residual_norm(x, scale, epsilon, implementation=name)

    def loss(x: jax.Array, scale: jax.Array) -> jax.Array:
        pairs = zip(both(x, scale), weights, strict=True)
        return sum(jnp.sum(y.astype(jnp.float32) * w.astype(jnp.float32)) for y, w in pairs)

    return both(x, scale), jax.grad(loss, argnums=(0, 1))(x, scale)


@pytest.mark.slow_cases("*shape[12]")
@pytest.mark.parametrize("shape", [(2, 256, 128), (384, 256), (1, 2, 128, 128)])
@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", ["xla", "pallas_interpret"])
def test_values_and_gradients_are_those_of_the_formula(
    shape: tuple[int, ...], epsilon: float, dtype: str, name: str
) -> None:
    x, *weights = (some(*shape, seed=i, dtype=dtype) for i in range(3))
    scale = some(shape[-1], seed=3)
    exact = [z.astype(jnp.float32) for z in (x, *weights)]
    expected = results(exact[0], scale, epsilon, exact[1:], "reference")
    actual = results(x, scale, epsilon, weights, name)
    assert actual[0][0].dtype == x.dtype and actual[1][0].dtype == x.dtype
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        worst = np.abs(np.asarray(a, np.float64) - np.asarray(e, np.float64)).max()
        assert worst <= TOLERANCE[dtype] * np.abs(e).max()


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((2, 256, 100), "bfloat16", "takes multiples of 128 vectors and numbers, not 256 of 100"),
        ((2, 100, 128), "bfloat16", "takes multiples of 128 vectors and numbers, not 100 of 128"),
        ((2, 0, 128), "bfloat16", "takes multiples of 128 vectors and numbers, not 0 of 128"),
        ((2, 128, 4096), "bfloat16", "takes vectors of at most"),
        ((128,), "bfloat16", "takes rows of vectors"),
        ((2, 256, 128), "float16", "computes in bfloat16 and float32, not in float16"),
    ],
)
def test_inputs_without_a_kernel_are_refused(
    shape: tuple[int, ...], dtype: str, reason: str
) -> None:
    x, scale = jnp.zeros(shape, dtype), jnp.zeros(shape[-1])
    with dispatch.use_backend("tpu", V4), pytest.raises(NotImplementedError, match=reason):
        residual_norm(x, scale, implementation="pallas_tpu")


def test_tpus_take_the_kernel_and_others_do_not() -> None:
    x, scale = jnp.zeros((2, 256, 1024), jnp.bfloat16), jnp.zeros(1024)
    assert dispatch.choice(OP, None, x, scale, EPSILON) == "xla"
    with dispatch.use_backend("tpu", V4):
        assert dispatch.choice(OP, None, x, scale, EPSILON) == "pallas_tpu"
