from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt.ops.dense import dense, weight_gradient


def both_passes(product: Callable, x: jax.Array, kernel: jax.Array, ct: jax.Array) -> tuple:
    """Returns a product and the gradients of its arguments, for the output gradient `ct`."""

    @jax.jit
    def run(x: jax.Array, kernel: jax.Array, ct: jax.Array) -> tuple:
        y, backward = jax.vjp(product, x, kernel)
        return y, backward(ct)

    return run(x, kernel, ct)


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [((6,), 5, 4), ((2, 3), 4, 5), ((2, 3, 2), 5, 4)]
)
def test_dense_and_its_gradients_are_those_of_the_plain_product(
    rows: tuple[int, ...], inputs: int, outputs: int
) -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(*rows, inputs)), jnp.float32)
    kernel = jnp.asarray(rng.normal(size=(inputs, outputs)), jnp.float32)
    ct = jnp.asarray(rng.normal(size=(*rows, outputs)), jnp.float32)
    y, (dx, dk) = both_passes(dense, x, kernel, ct)
    np.testing.assert_allclose(y, np.asarray(x) @ kernel, rtol=1e-5, atol=1e-6)
    flat_x, flat_ct = (np.asarray(a, np.float64).reshape(-1, a.shape[-1]) for a in (x, ct))
    np.testing.assert_allclose(dx, np.asarray(ct) @ np.asarray(kernel).T, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dk, flat_x.T @ flat_ct, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_inputs_and_outputs_may_be_several_axes(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    rng = np.random.default_rng(0)
    x, kernel, ct = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in [(2, 3, 4, 5), (4, 5, 2, 6), (2, 3, 2, 6)]
    )
    y, (dx, dk) = both_passes(lambda x, kernel: dense(x, kernel, 2), x, kernel, ct)
    expected = np.einsum("btmn,mnop->btop", x, kernel)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    expected = np.einsum("btop,mnop->btmn", ct, kernel)
    np.testing.assert_allclose(dx, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dk, np.einsum("btmn,btop->mnop", x, ct), rtol=1e-5, atol=1e-5)


def test_the_gradient_of_a_float32_kernel_is_summed_in_float32() -> None:
    x = jnp.ones((4096, 1), jnp.bfloat16)  # In bfloat16 the sum would stop at 256.
    direct = jax.jit(weight_gradient)(x, x)
    assert direct.dtype == jnp.float32
    assert float(direct[0, 0]) == 4096.0
    total = jax.grad(lambda k: jnp.sum(dense(x, k).astype(jnp.float32)))
    gradient = jax.jit(total)(jnp.ones((1, 1)))
    assert gradient.dtype == jnp.float32
    assert float(gradient[0, 0]) == 4096.0
