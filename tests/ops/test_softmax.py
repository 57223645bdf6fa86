import jax
import jax.numpy as jnp
import numpy as np

from brt.ops.softmax import MASKED, safe_softmax


def test_is_the_softmax_of_what_is_not_masked() -> None:
    logits = np.random.default_rng(0).normal(size=(3, 5)) * 30
    mask = np.array([[1, 1, 1, 1, 1], [1, 0, 1, 0, 1], [0, 0, 0, 1, 0]], bool)
    weights = np.where(mask, np.exp(logits), 0)
    expected = weights / weights.sum(axis=-1, keepdims=True)
    actual = safe_softmax(jnp.where(mask, jnp.asarray(logits, jnp.float32), MASKED))
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-7)
    assert not np.any(np.asarray(actual)[~mask])


def test_a_row_of_masked_logits_gives_zeros_and_no_gradient() -> None:
    logits = jnp.full((1, 4), MASKED)
    np.testing.assert_array_equal(safe_softmax(logits), 0)
    of_logits = jax.grad(lambda x: jnp.sum(safe_softmax(x) * jnp.arange(4.0)[None]))
    gradient = jax.jit(of_logits)(logits)
    np.testing.assert_array_equal(gradient, 0)


def test_large_logits_do_not_overflow() -> None:
    actual = safe_softmax(jnp.array([[256.0, 255.0, -256.0]], jnp.bfloat16))
    assert actual.dtype == jnp.float32
    e = np.exp(-1.0)
    np.testing.assert_allclose(actual, [[1 / (1 + e), e / (1 + e), 0]], rtol=1e-6)
