"""Tests that RG-LRU layers compute the equations of Griffin (De et al. 2024, section 2.4)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt.memories import rg_lru, token_state

LANES, BLOCKS, LENGTH, HEADS, SIZE = 2, 4, 4, 2, 6
TOKENS = BLOCKS * LENGTH


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def oracle(x: np.ndarray, learned: dict[str, np.ndarray], starts: np.ndarray) -> np.ndarray:
    """Returns the hidden states, computed token by token in float64.

    `starts` [lanes, tokens] marks the first tokens of documents.
    """
    result = np.zeros_like(x)
    for lane in range(len(x)):
        hidden, read = np.zeros(x.shape[2:]), []
        for t in range(x.shape[1]):
            if starts[lane, t]:
                hidden, read = np.zeros(x.shape[2:]), []
            read.append(x[lane, t])
            last = read[-4:]
            y = sum(k * z for k, z in zip(learned["convolution"][-len(last) :], last, strict=True))
            gates = [
                sigmoid(np.einsum("hr,hrs->hs", y, learned[name]) + learned[f"{name}_bias"])
                for name in ("input_gate", "recurrence_gate")
            ]
            a = np.exp(-8 * np.log1p(np.exp(learned["rate"])) * gates[1])
            hidden = a * hidden + np.sqrt(1 - a**2) * gates[0] * y
            result[lane, t] = hidden
    return result


@pytest.fixture(scope="module")
def given() -> tuple[np.ndarray, dict[str, np.ndarray], np.ndarray]:
    """Returns inputs, parameters, and document starts. In lane 1, documents start in the middle."""
    draw = np.random.default_rng(0).normal
    shapes = {
        "convolution": (4, HEADS, SIZE), "rate": (HEADS, SIZE),
        **{name: (HEADS, SIZE, SIZE) for name in ("input_gate", "recurrence_gate")},
        **{f"{name}_bias": (HEADS, SIZE) for name in ("input_gate", "recurrence_gate")},
    }  # fmt: skip
    learned = {name: draw(size=shape) for name, shape in shapes.items()}
    starts = np.zeros((LANES, BLOCKS), bool)
    starts[0, 0], starts[1, 1], starts[1, 2] = True, True, True
    return draw(size=(LANES, TOKENS, HEADS, SIZE)), learned, starts


@jax.jit
def hidden(x: Any, learned: dict[str, Any], starts: Any) -> jax.Array:
    """Returns the hidden states, computed with the functions of the layer."""
    since = token_state.tokens_since_start(starts, x.shape[1])
    empty = jnp.zeros((LANES, 3, HEADS, SIZE))
    convolved, _ = token_state.convolution(x, empty, learned["convolution"], since)
    gates = rg_lru.GateParameters(
        *(learned[name] for name in ("input_gate", "input_gate_bias", "recurrence_gate")),
        learned["recurrence_gate_bias"], learned["rate"],
    )  # fmt: skip
    a, b = rg_lru.recurrence_coefficients(convolved, gates)
    a = jnp.where((since == 0)[:, :, None, None], 0, a)
    return rg_lru.scan(a, b, jnp.zeros((LANES, HEADS, SIZE)))


def test_hidden_states_are_those_of_the_equations(given: tuple) -> None:
    x, learned, starts = given
    expected = oracle(x, learned, np.repeat(starts, LENGTH, axis=1) & (np.arange(TOKENS) % 4 == 0))
    arrays = {name: jnp.asarray(value, jnp.float32) for name, value in learned.items()}
    found = hidden(jnp.asarray(x, jnp.float32), arrays, jnp.asarray(starts))
    np.testing.assert_allclose(found, expected, atol=2e-5)


def test_states_decay_slowly_at_first() -> None:
    rate = rg_lru._rate_init(jax.random.key(0), (4, 64), jnp.float32)
    a, scale = jax.jit(rg_lru.decays)(rate, jnp.ones_like(rate))
    assert (a > 0.9).all() and (a < 0.999).all() and a.std() > 0.02
    np.testing.assert_allclose(a**2 + scale**2, 1, atol=1e-6)


def test_closed_gates_give_finite_gradients() -> None:
    """If the recurrence gate is closed, a is 1, where the root of 1 - a^2 has no derivative."""
    normal = np.random.default_rng(0).normal
    shape = (1, 4, HEADS, SIZE)
    x = jnp.asarray(normal(size=shape), jnp.float32)
    kernel, bias = jnp.zeros((HEADS, SIZE, SIZE)), jnp.zeros((HEADS, SIZE))
    gates = rg_lru.GateParameters(kernel, bias, kernel, bias - 200, bias)

    @jax.jit
    @jax.grad
    def gradients(given: tuple) -> jax.Array:
        return sum(jnp.sum(part) for part in rg_lru.recurrence_coefficients(*given))

    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients((x, gates))))
