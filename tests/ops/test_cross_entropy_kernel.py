"""Compares the TPU kernels of the cross-entropy loss, interpreted, with the reference."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import WATCHED, assert_close

from brt.ops.cross_entropy import pallas_tpu, reference, token_scores
from brt.ops.cross_entropy.chunks import Targets

LANES, TOKENS, WIDTH, VOCABULARY = 4, 48, 128, 1280  # 1280 tokens make two tiles of the vocabulary.
SCALE = 0.3
# Relative to the largest magnitude of an array. Probabilities are rounded before they are
# multiplied.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}


def inputs(dtype: str = "float32") -> tuple[jax.Array, ...]:
    """Returns hidden vectors, the embedding, targets, and the mask of scored targets."""
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(LANES, TOKENS, WIDTH)), dtype)
    embedding = jnp.asarray(rng.normal(size=(VOCABULARY, WIDTH)), jnp.float32)
    embedding = embedding.astype(dtype).astype(jnp.float32)  # rounded to the dtype of the products
    targets = jnp.asarray(rng.integers(0, VOCABULARY, (LANES, TOKENS)), jnp.int32)
    return hidden, embedding, targets, jnp.asarray(rng.random((LANES, TOKENS)) < 0.7)


def summed(function: Callable[..., Any], smoothing: float, **options: Any) -> Callable[..., Any]:
    """Returns a jitted function that computes the results of an implementation, and its
    gradients.
    """

    def loss(hidden: jax.Array, embedding: jax.Array, targets: jax.Array, mask: Any) -> tuple:
        inputs = Targets(hidden, embedding, targets, mask=mask)
        return function(inputs, scale=SCALE, chunk=16, smoothing=smoothing, **options)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


def in_float64(arrays: tuple[jax.Array, ...], smoothing: float) -> Any:
    """Returns the loss and gradients of the reference in float64."""
    hidden, embedding, *given = arrays
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in (hidden, embedding)]
        return summed(reference.cross_entropy, smoothing)(*wide, *given)


@pytest.mark.slow_cases("float32-0.0", "bfloat16-*")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_and_gradients_equal_float64_and_nothing_unwritten_is_read(
    dtype: str, smoothing: float, capfd: pytest.CaptureFixture
) -> None:
    arrays = inputs(dtype)
    found = summed(pallas_tpu.cross_entropy, smoothing, interpret=WATCHED)(*arrays)
    assert found[1][0].dtype == dtype and found[1][1].dtype == jnp.float32
    assert_close(found, in_float64(arrays, smoothing), TOLERANCE[dtype])
    assert "RACE" not in capfd.readouterr().out


@pytest.mark.slow_cases("wrong")
@pytest.mark.parametrize("surely", ["right", "wrong"])
def test_tokens_that_are_all_but_certain_keep_exact_gradients(surely: str) -> None:
    """The kernel does not compute 1 - p of a target as a difference of nearly equal numbers. A
    target whose logit is 100 or more above or below all other logits causes no division by zero.
    """
    hidden, embedding, targets, mask = inputs()
    rows = jnp.take(embedding, targets, axis=0)
    sign = 1 if surely == "right" else -1
    hidden = sign * 2.5 * rows / jnp.mean(rows * rows, axis=-1, keepdims=True)
    arrays = hidden.at[:, ::2].multiply(0.3), embedding, targets, mask
    found = summed(pallas_tpu.cross_entropy, 0.0, interpret=True)(*arrays)
    wanted = in_float64(arrays, 0.0)
    assert_close(found, wanted, 3e-5)
    d_hidden, by_row = (np.asarray(x[1][0], np.float64) for x in (found, wanted))
    for row in range(0, TOKENS, 2):
        assert_close(d_hidden[:, row], by_row[:, row], 1e-4)


def test_scores_are_those_of_the_formula() -> None:
    hidden, embedding, targets, _ = inputs()
    given = hidden, embedding, targets.at[:, ::3].set(jnp.argmax(hidden @ embedding.T, -1)[:, ::3])
    options = {"scale": SCALE, "chunk": 16}
    found = token_scores(*given, implementation="pallas_interpret", **options)
    wanted = reference.token_scores(Targets(*given), **options)
    assert_close(found.nats, wanted.nats, TOLERANCE["float32"])
    np.testing.assert_array_equal(found.right, wanted.right)
    assert 0 < np.mean(found.right) < 1


def test_vectors_of_any_width_are_padded() -> None:
    hidden, embedding, *given = inputs()
    arrays = (hidden[..., :72], embedding[:, :72], *given)
    found = summed(pallas_tpu.cross_entropy, 0.1, interpret=True)(*arrays)
    assert found[1][0].shape == arrays[0].shape and found[1][1].shape == arrays[1].shape
    assert_close(found, in_float64(arrays, 0.1), TOLERANCE["float32"])
