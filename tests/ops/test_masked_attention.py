import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt.ops import masked_attention
from brt.ops.masked_attention import masked_softmax


def attend(seen: np.ndarray, dropout: callable = None, **x: np.ndarray) -> jax.Array:
    compiled = jax.jit(lambda x: masked_attention.attend(**x, dropout=dropout))
    return compiled({**x, "seen": seen})


def arrays(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "queries": rng.normal(size=(2, 3, 2, 4)).astype(np.float32),
        "keys": rng.normal(size=(2, 5, 2, 4)).astype(np.float32),
        "values": rng.normal(size=(2, 5, 2, 4)).astype(np.float32),
        "bias": rng.normal(size=(2, 3, 5)).astype(np.float32),
    }


def attended(x: dict[str, np.ndarray], seen: np.ndarray) -> np.ndarray:
    """Query by query in float64; `seen` [B, Q, S]."""
    q, k, v, bias = (x[name].astype(np.float64) for name in ("queries", "keys", "values", "bias"))
    y = np.zeros_like(q)
    for b, t, h in np.ndindex(*q.shape[:3]):
        places = np.flatnonzero(seen[b, t])
        if len(places):
            weights = np.exp(k[b, places, h] @ q[b, t, h] + bias[h, t, places])
            y[b, t, h] = weights / weights.sum() @ v[b, places, h]
    return y


def test_queries_read_what_they_see_and_nothing_else() -> None:
    x, seen = arrays(), np.random.default_rng(1).random((2, 3, 5)) < 0.6
    seen[0, 1] = False
    y = attend(**x, seen=seen)
    np.testing.assert_allclose(y, attended(x, seen), atol=1e-6)
    assert not np.any(y[0, 1])


def test_a_mask_of_keys_holds_for_all_queries_and_leading_axes_are_free() -> None:
    x, mask = arrays(), np.array([[1, 1, 1, 0, 0], [1, 0, 1, 1, 1]], bool)
    expected = attended(x, np.broadcast_to(mask[:, None], (2, 3, 5)))
    np.testing.assert_allclose(attend(**x, seen=mask[:, None]), expected, atol=1e-6)
    bias = x.pop("bias")
    beams = {name: np.stack([array] * 2, axis=1) for name, array in x.items()}
    y = attend(**beams, bias=bias, seen=mask[:, None, None])
    np.testing.assert_allclose(y, np.stack([expected] * 2, axis=1), atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_huge_and_unseen_logits_leave_finite_gradients(dtype: str) -> None:
    x = {name: jnp.asarray(array, dtype) * 1e3 for name, array in arrays().items()}
    bias, seen = x.pop("bias").astype(jnp.float32), jnp.zeros((2, 3, 5), bool).at[:, 0, 2].set(True)

    def loss(x: dict) -> jax.Array:
        return jnp.sum(attend(**x, bias=bias, seen=seen).astype(jnp.float32))

    gradients = jax.jit(jax.grad(loss))(x)
    assert all(np.isfinite(np.asarray(g, np.float32)).all() for g in gradients.values())
    assert np.any(gradients["values"][:, 2]) and not np.any(gradients["values"][:, 1])


def test_dropout_acts_on_the_weights() -> None:
    x, seen = arrays(), np.ones((2, 1, 5), bool)
    halved = attend(**x, seen=seen, dropout=lambda weights: weights * 0.5)
    np.testing.assert_allclose(halved, 0.5 * attend(**x, seen=seen), atol=1e-6)


def test_rows_of_nothing_are_zero_and_others_sum_to_one() -> None:
    logits = jnp.array([[3e38, -3e38, 0.0], [1.0, 2.0, 3.0]])
    seen = jnp.array([[True, True, False], [False, False, False]])
    np.testing.assert_allclose(masked_softmax(logits, seen), [[1, 0, 0], [0, 0, 0]])
