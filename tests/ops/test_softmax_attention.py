"""The written-out backward pass against autodiff of the plain form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt.ops.softmax_attention import attend, attend_by_head

SHAPE = {"queries": (2, 3, 5, 4), "keys": (2, 3, 7, 4), "values": (2, 3, 7, 4)}  # B H Q|S K


def plain(
    q: jax.Array, k: jax.Array, v: jax.Array, usable: np.ndarray, dropout: float | jax.Array,
    null_keys: bool,
) -> jax.Array:  # fmt: skip
    """Attention as its definition says."""
    logits = q @ k.swapaxes(-1, -2)
    seen = usable[:, None] if usable.ndim == 3 else usable[:, None, None]
    logits = jnp.where(seen, logits, 0.0 if null_keys else -jnp.inf)
    return (jnp.where(seen, jax.nn.softmax(logits, axis=-1), 0) * dropout) @ v


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("by_query", [False, True])
@pytest.mark.parametrize("null_keys", [False, True])
def test_values_and_gradients(null_keys: bool, by_query: bool, dropped: bool) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in SHAPE.values())
    usable = np.ones((2, 7), bool)
    usable[1, :4] = False
    if by_query:
        usable = np.stack([usable, ~usable, usable, usable, ~usable], axis=1)
        usable[0, :, 3] = True
    dropout = jnp.asarray(rng.choice([0.0, 1.25], (2, 3, 5, 7)), jnp.float32) if dropped else None
    ct = jnp.asarray(rng.normal(size=q.shape), jnp.float32)
    ours, backward = jax.vjp(
        lambda *x: attend_by_head(*x, jnp.asarray(usable), dropout, null_keys=null_keys), q, k, v
    )
    factor = dropout if dropped else 1.0
    expected, plain_backward = jax.vjp(lambda *x: plain(*x, usable, factor, null_keys), q, k, v)
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)
    for found, wanted in zip(backward(ct), plain_backward(ct), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_heads_may_stand_behind_the_rows() -> None:
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in SHAPE.values())
    rows_first = (x.swapaxes(1, 2) for x in (q, k, v))
    by_head = attend_by_head(q, k, v, None, null_keys=False)
    np.testing.assert_array_equal(attend(*rows_first).swapaxes(1, 2), by_head)
