"""The written-out backward pass against autodiff of the plain form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt.ops.softmax_attention import attend, attend_by_head

SHAPE = {"queries": (2, 3, 5, 4), "keys": (2, 3, 7, 4), "values": (2, 3, 7, 4)}  # B H Q|S K


def plain(
    q: jax.Array, k: jax.Array, v: jax.Array, usable: np.ndarray, null_keys: bool
) -> jax.Array:
    """Attention as its definition says."""
    logits = q @ k.swapaxes(-1, -2)
    seen = jnp.asarray(usable)[:, None, None, :]
    logits = jnp.where(seen, logits, 0.0 if null_keys else -jnp.inf)
    return jax.nn.softmax(logits, axis=-1) @ jnp.where(seen.swapaxes(-1, -2), v, 0)


@pytest.mark.parametrize("null_keys", [False, True])
def test_values_and_gradients(null_keys: bool) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in SHAPE.values())
    usable = np.ones((2, 7), bool)
    usable[1, :4] = False
    ct = jnp.asarray(rng.normal(size=q.shape), jnp.float32)
    ours, backward = jax.vjp(
        lambda q, k, v: attend_by_head(q, k, v, jnp.asarray(usable), null_keys=null_keys), q, k, v
    )
    expected, plain_backward = jax.vjp(lambda q, k, v: plain(q, k, v, usable, null_keys), q, k, v)
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)
    for found, wanted in zip(backward(ct), plain_backward(ct), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_heads_may_stand_behind_the_rows() -> None:
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in SHAPE.values())
    rows_first = (x.swapaxes(1, 2) for x in (q, k, v))
    by_head = attend_by_head(q, k, v, None, null_keys=False)
    np.testing.assert_array_equal(attend(*rows_first).swapaxes(1, 2), by_head)
