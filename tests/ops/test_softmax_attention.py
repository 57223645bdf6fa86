"""Compares softmax attention, which has an explicit backward pass, with autodiff of its
definition.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt.ops.softmax_attention import attend_by_head

SHAPE = {"queries": (2, 3, 5, 4), "keys": (2, 3, 7, 4), "values": (2, 3, 7, 4)}  # [B, H, Q or S, K]


def plain(
    q: jax.Array, k: jax.Array, v: jax.Array, usable: np.ndarray, dropout: float | jax.Array
) -> jax.Array:
    """Returns attention as the definition says, with a large matrix of all weights."""
    logits = q @ k.swapaxes(-1, -2)
    seen = usable[:, None] if usable.ndim == 3 else usable[:, None, None]
    logits = jnp.where(seen, logits, -jnp.inf)
    return (jnp.where(seen, jax.nn.softmax(logits, axis=-1), 0) * dropout) @ v


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("by_query", [False, True])
def test_values_and_gradients_equal_the_definition(by_query: bool, dropped: bool) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in SHAPE.values())
    usable = np.ones((2, 7), bool)
    usable[1, :4] = False
    if by_query:
        usable = np.stack([usable, ~usable, usable, usable, ~usable], axis=1)
        usable[0, :, 3] = True
    dropout = jnp.asarray(rng.choice([0.0, 1.25], (2, 3, 5, 7)), jnp.float32) if dropped else None
    ct = jnp.asarray(rng.normal(size=q.shape), jnp.float32)
    factor = dropout if dropped else 1.0

    def ours(*x: jax.Array) -> jax.Array:
        return attend_by_head(*x, jnp.asarray(usable), dropout)

    def by_formula(*x: jax.Array) -> jax.Array:
        return plain(*x, usable, factor)

    def both_passes(function: Callable) -> tuple:
        y, backward = jax.vjp(function, q, k, v)
        return y, backward(ct)

    compiled = jax.jit(both_passes, static_argnums=0)
    (y, found), (expected, wanted) = compiled(ours), compiled(by_formula)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    for a, e in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5)
