import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt.ops.depthwise_convolution import depthwise_convolution


@pytest.mark.slow_cases("9")
@pytest.mark.parametrize("tokens", [9, 2])
def test_each_channel_is_convolved_on_its_own(tokens: int) -> None:
    """Compares with NumPy's `convolve`, which reverses the kernel. One case has fewer tokens than
    the kernel is wide.
    """
    rng = np.random.default_rng(0)
    x, kernel, ct = (rng.normal(size=s) for s in ((2, tokens, 3), (5, 3), (2, tokens, 3)))
    arrays = [jnp.asarray(a, jnp.float32) for a in (x, kernel)]
    expected, of_x, of_kernel = np.zeros_like(x), np.zeros_like(x), np.zeros_like(kernel)
    for b, d in np.ndindex(2, 3):
        expected[b, :, d] = np.convolve(x[b, :, d], kernel[::-1, d])[2 : 2 + tokens]
        of_x[b, :, d] = np.convolve(ct[b, :, d], kernel[:, d])[2 : 2 + tokens]
        of_kernel[:, d] += np.correlate(np.pad(x[b, :, d], 2), ct[b, :, d], "valid")

    @jax.jit
    def both_passes(ct: jax.Array, *arrays: jax.Array) -> tuple:
        y, backward = jax.vjp(depthwise_convolution, *arrays)
        return y, *backward(ct)

    y, dx, dk = both_passes(jnp.asarray(ct, jnp.float32), *arrays)
    for found, wanted in ((y, expected), (dx, of_x), (dk, of_kernel)):
        np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_what_is_computed_has_the_dtype_of_the_inputs() -> None:
    x, kernel = jnp.ones((1, 4, 2), jnp.bfloat16), jnp.ones((3, 2))
    y = depthwise_convolution(x, kernel)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(y[0, :, 0], np.float32), [2, 3, 3, 2])
