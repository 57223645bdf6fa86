"""Compares attention to parts of the keys with one softmax over all keys in float64."""

import jax
import jax.numpy as jnp
import numpy as np

from brt.ops.dropout import Dropout
from brt.ops.partial_attention import attend_to_part, merge_parts
from brt.ops.softmax import FLOOR, MASKED

QUERIES, KEYS, WIDTH = 5, 12, 4
rng = np.random.default_rng(0)
LOGITS = rng.normal(size=(2, QUERIES, KEYS)) * 3
VALUES = rng.normal(size=(2, KEYS, WIDTH))
D_OUTPUT, D_LSE = rng.normal(size=(2, QUERIES, WIDTH)), rng.normal(size=(2, QUERIES))
SEEN = rng.random(size=LOGITS.shape) < 0.7
SEEN[0, 0] = False


def weighed(
    logits: np.ndarray, values: np.ndarray, factors: np.ndarray | float
) -> tuple[float, float]:
    """Returns the sum that is differentiated, in float64, and the sum of its terms' magnitudes.

    Rows without keys add nothing.
    """
    weights = np.where(SEEN, np.exp(logits), 0)
    sums = np.maximum(weights.sum(axis=-1), 1e-300)
    read = (weights * factors) @ values / sums[..., None]
    some = SEEN.any(axis=-1)
    terms = read * D_OUTPUT, np.where(some, np.log(sums), 0) * D_LSE
    return sum(map(np.sum, terms)), sum(np.sum(np.abs(term)) for term in terms)


def check_gradients(dropout: Dropout | None) -> None:
    """Compares gradients with finite differences along random directions."""
    factors = (
        1.0 if dropout is None else np.asarray(dropout.factors(LOGITS.shape, jnp.dtype("float32")))
    )

    def run(logits: jax.Array, values: jax.Array) -> jax.Array:
        part = attend_to_part(jnp.where(SEEN, logits, MASKED), values, dropout)
        lse = jnp.where(jnp.asarray(SEEN.any(axis=-1)), part.lse, 0)
        return jnp.sum(part.output * D_OUTPUT) + jnp.sum(lse * D_LSE)

    x = [jnp.asarray(a, jnp.float32) for a in (LOGITS, VALUES)]
    value, gradients = jax.jit(jax.value_and_grad(run, argnums=(0, 1)))(*x)
    expected, size = weighed(LOGITS, VALUES, factors)
    assert abs(value - expected) <= 1e-5 * size
    assert not np.any(np.asarray(gradients[0])[~SEEN])
    for i, gradient in enumerate(gradients):
        direction = rng.normal(size=gradient.shape)

        def at(step: float, i: int = i, direction: np.ndarray = direction) -> float:
            moved = [a + step * direction if j == i else a for j, a in enumerate((LOGITS, VALUES))]
            return weighed(moved[0], moved[1], factors)[0]

        slope = (at(1e-6) - at(-1e-6)) / 2e-6
        along = float(np.sum(np.asarray(gradient, np.float64) * direction))
        scale = np.linalg.norm(gradient) * np.linalg.norm(direction)
        assert abs(along - slope) <= 1e-5 * scale


def test_gradients_are_those_of_finite_differences() -> None:
    check_gradients(None)


def test_gradients_with_dropout_drop_the_same_weights() -> None:
    check_gradients(Dropout(jax.random.key(0), 0.25))


def test_parts_make_one_softmax() -> None:
    logits, values = (jnp.asarray(a, jnp.float32) for a in (LOGITS, VALUES))
    attend = jax.jit(attend_to_part)
    whole = attend(logits, values)
    parts = [attend(logits[..., keys], values[:, keys]) for keys in (slice(0, 6), slice(6, KEYS))]
    for a, b in zip(merge_parts(parts), whole, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_query_without_keys_reads_nothing() -> None:
    part = attend_to_part(jnp.full((1, 3), MASKED), jnp.ones((3, 2)))
    np.testing.assert_array_equal(part.output, 0)
    np.testing.assert_array_equal(part.lse, FLOOR)
    of_logits = jax.grad(lambda x: jnp.sum(attend_to_part(x, jnp.ones((3, 2))).output))
    gradient = jax.jit(of_logits)(jnp.full((1, 3), MASKED))
    np.testing.assert_array_equal(gradient, 0)
