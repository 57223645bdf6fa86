"""Tests that Gated DeltaNet layers compute the recurrence of Yang, Kautz, Hatamizadeh 2024 (section
3).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from model_settings import with_settings
from one_layer import layer_params, new_state

from brt.config import Model
from brt.memories import GatedDeltaNet, gated_delta_net, token_state

HEADS, KEY, VALUE = 3, 4, 6
MODEL = Model(
    layers=1, model_dim=16, heads=2, head_dim=8, mlp_dim=16, window=4, dtype="float32",
    vocab_size=32,
    kinds=(GatedDeltaNet(layers=(0,), heads=HEADS, key_dim=KEY, value_dim=VALUE),),
)  # fmt: skip
LANES, BLOCKS, LENGTH = 2, 10, 4
TOKENS = BLOCKS * LENGTH
TOLERANCE = 2e-5  # absolute, float32; the compared values have magnitude 1


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def oracle(h: np.ndarray, learned: dict[str, np.ndarray], starts: np.ndarray) -> np.ndarray:
    """Returns the outputs, computed token by token in float64.

    The state of a head is S [V, K], as in equation 10: S_t = S_(t-1) a (I - b k k^T) + b v k^T.
    `starts` [lanes, tokens] marks the first tokens of documents.
    """
    kernels = [learned[name] for name in ("queries", "keys", "values")]
    result = np.zeros_like(h)
    for lane in range(LANES):
        for t in range(TOKENS):
            if t == 0 or starts[lane, t]:
                states, read = np.zeros((HEADS, VALUE, KEY)), []
            x = h[lane, t]
            read.append(np.concatenate([np.tensordot(x, w, 1) for w in kernels], axis=-1))
            last = read[-4:]
            y = sum(w * z for w, z in zip(learned["convolution"][-len(last) :], last, strict=True))
            y = y * sigmoid(y)
            q, k, v = np.split(y, [KEY, 2 * KEY], axis=-1)
            q, k = (z / np.linalg.norm(z, axis=-1, keepdims=True) for z in (q, k))
            b = sigmoid(x @ learned["strength"])
            step = np.log1p(np.exp(x @ learned["step"] + learned["step_bias"]))
            a = np.exp(-np.exp(learned["rate"]) * step)
            for i in range(HEADS):
                erase = np.eye(KEY) - b[i] * np.outer(k[i], k[i])
                states[i] = states[i] @ (a[i] * erase) + b[i] * np.outer(v[i], k[i])
                o = states[i] @ q[i] * KEY**-0.5
                o = o / np.sqrt(np.mean(o**2) + 1e-6) * learned["read_norm"]
                gate = x @ learned["gate"][:, i]
                result[lane, t] += (o * gate * sigmoid(gate)) @ learned["output"][i]
    return result


@pytest.fixture(scope="module")
def learned(random_params: Any) -> dict[str, jax.Array]:
    return layer_params(random_params, MODEL)["memory"]


def document_starts() -> np.ndarray:
    """Returns a boolean array [lanes, blocks]. In lane 1, two documents start in the middle, the
    second of them within a chunk.
    """
    starts = np.zeros((LANES, BLOCKS), bool)
    starts[0, 0], starts[1, 1], starts[1, 6] = True, True, True
    return starts


def test_outputs_are_those_of_the_recurrence(learned: dict[str, jax.Array]) -> None:
    h = np.random.default_rng(0).normal(size=(LANES, TOKENS, MODEL.model_dim))
    starts = document_starts()
    since = token_state.tokens_since_start(jnp.asarray(starts), TOKENS)
    state = new_state(MODEL, LANES)
    apply = jax.jit(gated_delta_net.DeltaMemory(MODEL).apply)
    found, _ = apply({"params": learned}, jnp.asarray(h, jnp.float32), state, since)
    arrays = {name: np.asarray(value, np.float64) for name, value in learned.items()}
    first = np.repeat(starts, LENGTH, axis=1) & (np.arange(TOKENS) % LENGTH == 0)
    np.testing.assert_allclose(found, oracle(h, arrays, first), atol=TOLERANCE)


def writes(tokens: int, seed: int = 0, *, similar: bool = False) -> gated_delta_net.DeltaInputs:
    """Returns random tokens; `similar` ones have the same key, full strength and no decay."""
    normal = np.random.default_rng(seed).normal
    queries, keys = normal(size=(2, LANES, tokens, HEADS, KEY))
    decay, strength = normal(size=(2, LANES, tokens, HEADS))
    # A few tokens forget nearly everything, and others nearly nothing.
    decay, strength = -np.exp(3 * decay - 3), sigmoid(2 * strength)
    if similar:
        keys, decay, strength = keys[:, :1] + 0 * keys, 0 * decay, 1 + 0 * strength
    units = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (queries, keys))
    values = normal(size=(LANES, tokens, HEADS, VALUE))
    arrays = (*units, values, decay, strength)
    return gated_delta_net.DeltaInputs(*(jnp.asarray(x, jnp.float32) for x in arrays))


def delta_rule_by_token(tokens: Any, state: jax.Array, since_start: jax.Array) -> tuple:
    """Computes `delta_rule` token by token."""

    def body(state: jax.Array, inputs: tuple) -> tuple[jax.Array, jax.Array]:
        token, since = inputs
        state = jnp.where((since == 0)[:, None, None, None], 0, state)
        read, state = gated_delta_net.delta_step(jax.tree.map(lambda x: x[:, None], token), state)
        return state, read[:, 0]

    by_token = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (tokens, since_start))
    state, read = jax.lax.scan(body, state, by_token)
    return jnp.moveaxis(read, 0, 1), state


@pytest.mark.slow_cases("40-64-*", "40-16-True", "1-*", "6-8-False")
@pytest.mark.parametrize("similar", [False, True])
@pytest.mark.parametrize(("tokens", "chunk"), [(1, 16), (6, 8), (40, 16), (40, 64)])
def test_chunks_have_the_values_and_gradients_of_single_tokens(
    tokens: int, chunk: int, similar: bool
) -> None:
    since = np.full((LANES, tokens), 1000) + np.arange(tokens)[None]
    since[1, tokens // 3 :] = np.arange(tokens - tokens // 3)
    state = np.random.default_rng(1).normal(size=(LANES, HEADS, KEY, VALUE)).astype(np.float32)

    def by_chunks(*arguments: Any) -> Any:
        return gated_delta_net.delta_rule(*arguments, chunk=chunk)

    def results(rule: Any) -> Any:
        def loss(tokens: Any, state: Any) -> tuple:
            outputs = rule(tokens, state, jnp.asarray(since))
            return sum(jnp.sum(jnp.sin(x)) for x in outputs), outputs

        graded = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        (_, outputs), gradients = jax.jit(graded)(writes(tokens, similar=similar), state)
        return outputs, gradients

    one, other = results(by_chunks), results(delta_rule_by_token)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=TOLERANCE), one, other)


def test_extreme_decays_and_keys_of_zeros_give_finite_gradients() -> None:
    tokens = writes(24)
    tokens = tokens._replace(
        keys=tokens.keys.at[:, 3:9].set(0), log_decay=tokens.log_decay.at[:, ::5].set(-1e4)
    )
    since = jnp.asarray(np.arange(24)[None] + np.array([[0], [1000]]))

    @jax.jit
    @jax.grad
    def gradients(tokens: gated_delta_net.DeltaInputs) -> jax.Array:
        state = jnp.ones((LANES, HEADS, KEY, VALUE))
        return sum(jnp.sum(x) for x in gated_delta_net.delta_rule(tokens, state, since, chunk=16))

    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients(tokens)))


@pytest.mark.slow_cases("4")
@pytest.mark.parametrize("size", [4, 32])
def test_the_inverse_of_a_triangular_matrix_has_its_gradient(size: int) -> None:
    below = np.tril(np.random.default_rng(0).uniform(-1, 1, size=(2, size, size)), -1) / 2
    exact = np.linalg.inv(np.eye(size)[None] + below)
    below = jnp.asarray(below, jnp.float32)

    @jax.jit
    def inverse_and_gradients(below: jax.Array) -> tuple[jax.Array, ...]:
        inverse, backward = jax.vjp(gated_delta_net.unit_lower_inverse, below)
        _, backward_of_library = jax.vjp(jnp.linalg.inv, jnp.eye(size)[None] + below)
        return inverse, *backward(jnp.cos(inverse)), *backward_of_library(jnp.cos(inverse))

    inverse, gradient, expected = inverse_and_gradients(below)
    np.testing.assert_allclose(inverse, exact, atol=TOLERANCE)
    np.testing.assert_allclose(gradient, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.slow
def test_heads_decay_at_different_rates_at_first() -> None:
    m = with_settings(MODEL, {"GatedDeltaNet.heads": 64})
    since = jnp.zeros((1, 4), jnp.int32)
    state = new_state(m, 1)
    h = jnp.zeros((1, 4, m.model_dim))
    params = nn.meta.unbox(gated_delta_net.DeltaMemory(m).init(jax.random.key(0), h, state, since))
    log = -np.exp(params["params"]["rate"]) * jax.nn.softplus(params["params"]["step_bias"])
    assert (-1.6 <= log).all() and (log <= -1e-3 * 0.99).all() and np.log(-log).std() > 0.5
