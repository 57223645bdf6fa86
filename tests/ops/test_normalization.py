import jax
import jax.numpy as jnp
import numpy as np

from brt.ops.normalization import EPSILON, l2_normalize, layer_norm, rms_norm

X = np.random.default_rng(0).normal(size=(2, 3, 8))
SCALE = np.linspace(0.5, 2.0, 8)


def test_rms_norm_and_l2_normalize_are_their_formulas() -> None:
    rms = X / np.sqrt((X**2).mean(-1, keepdims=True) + EPSILON) * SCALE
    unit = X / np.sqrt((X**2).sum(-1, keepdims=True) + EPSILON)
    x, scale = jnp.asarray(X, jnp.float32), jnp.asarray(SCALE, jnp.float32)
    np.testing.assert_allclose(rms_norm(x, scale), rms, rtol=1e-5)
    np.testing.assert_allclose(l2_normalize(x), unit, rtol=1e-5)


def test_the_dtype_stays_and_statistics_are_float32() -> None:
    # The square of 3e15 is within the range of float32, the square of 3e20 would not be.
    x = jnp.full((1, 4), 3e15, jnp.bfloat16)
    assert rms_norm(x, jnp.ones(4)).dtype == l2_normalize(x).dtype == jnp.bfloat16
    np.testing.assert_allclose(rms_norm(x, jnp.ones(4)).astype(jnp.float32), 1.0)
    np.testing.assert_allclose(l2_normalize(x).astype(jnp.float32), 0.5)


def test_zero_vectors_stay_zero_with_finite_gradients() -> None:
    zeros = jnp.zeros((1, 4))
    for normalize in (l2_normalize, lambda x: rms_norm(x, jnp.ones(4))):
        np.testing.assert_array_equal(normalize(zeros), 0)
        assert np.all(np.isfinite(jax.grad(lambda x, f=normalize: jnp.sum(f(x)))(zeros)))


def test_gradients_are_those_of_the_formulas() -> None:
    def rms(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + EPSILON) * scale[None, None]

    def unit(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x / jnp.sqrt(jnp.sum(x**2, axis=-1, keepdims=True) + EPSILON) * scale[None, None]

    x, scale = jnp.asarray(X, jnp.float32), jnp.asarray(SCALE, jnp.float32)
    ct = jnp.asarray(np.random.default_rng(1).normal(size=X.shape), jnp.float32)
    for ours, plain in ((rms_norm, rms), (lambda x, s: l2_normalize(x) * s[None, None], unit)):
        found, expected = (
            jax.jit(lambda x, scale, f=f: jax.vjp(f, x, scale)[1](ct))(x, scale)
            for f in (ours, plain)
        )
        for a, e in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5)


def test_layer_norm_centres_scales_and_shifts() -> None:
    rng = np.random.default_rng(0)
    x, scale, bias = 3 + rng.normal(size=(2, 5, 8)), rng.normal(size=8), rng.normal(size=8)
    y = layer_norm(*(jnp.asarray(a, jnp.float32) for a in (x, scale, bias)), 1e-2)
    centred = x - x.mean(axis=-1, keepdims=True)
    deviation = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-2)
    np.testing.assert_allclose(y, centred / deviation * scale + bias, atol=1e-5)


def test_the_epsilon_of_rms_norm_can_be_chosen() -> None:
    x, scale = jnp.full((1, 4), 0.1), jnp.ones(4)
    np.testing.assert_allclose(rms_norm(x, scale, 0.03), 0.1 / np.sqrt(0.01 + 0.03), rtol=1e-6)
