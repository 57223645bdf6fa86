"""Tests the KL divergence of distillation against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt.ops.distillation import summed_divergence

B, T, D, V, SCALE = 2, 6, 5, 11, 0.7


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("chunk", [2, 6])
def test_value_and_gradients_are_those_of_numpy(chunk: int) -> None:
    rng = np.random.default_rng(0)
    student, teacher = rng.normal(size=(2, B, T, D))
    ours, theirs = rng.normal(size=(2, V, D))
    mask = rng.random((B, T)) < 0.7
    log_p, log_q = (
        log_softmax(SCALE * vectors @ weights.T)
        for vectors, weights in ((teacher, theirs), (student, ours))
    )
    nats = (np.exp(log_p) * (log_p - log_q)).sum(axis=-1)
    expected = nats[mask].sum()
    # The derivative with respect to the student's logits is q - p.
    d_logits = SCALE * (np.exp(log_q) - np.exp(log_p)) * mask[..., None]
    gradients = d_logits @ ours, np.einsum("btv,btd->vd", d_logits, student)

    def loss(
        student: jax.Array, ours: jax.Array, teacher: jax.Array, theirs: jax.Array
    ) -> jax.Array:
        return summed_divergence(
            student, teacher, jnp.asarray(mask), ours, theirs,
            scale=SCALE, chunk=chunk,
        )  # fmt: skip

    arguments = [jnp.asarray(x, jnp.float32) for x in (student, ours, teacher, theirs)]
    value, found = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))(*arguments)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for gradient, right in zip(found, gradients, strict=False):
        np.testing.assert_allclose(gradient, right, atol=2e-5)
    for gradient in found[2:]:  # The teacher is a constant.
        np.testing.assert_array_equal(gradient, 0)
