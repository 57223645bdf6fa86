"""Tests experts against a loop over all experts, which multiplies every token with each."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt.ops.experts import ExpertWeights, apply_experts, gated_unit, route

WIDTH, HIDDEN, EXPERTS, CHOSEN = 6, 10, 5, 2
TOLERANCE = 1e-5  # of float32, relative to the largest number


def drawn(tokens: int) -> tuple[jax.Array, ExpertWeights]:
    draw = np.random.default_rng(tokens).normal
    into, hidden = (EXPERTS, WIDTH, HIDDEN), (EXPERTS, HIDDEN)
    shapes = (
        (WIDTH, EXPERTS), (EXPERTS,), into, hidden, into, hidden, (EXPERTS, HIDDEN, WIDTH),
        (EXPERTS, WIDTH),
    )  # fmt: skip
    weights = ExpertWeights(*(jnp.asarray(draw(size=shape), jnp.float32) for shape in shapes))
    assert weights.router_bias is not None
    weights = weights._replace(router_bias=weights.router_bias.at[3].set(-99))  # Never chosen.
    return jnp.asarray(draw(size=(2, tokens, WIDTH)), jnp.float32), weights


def by_loop(x: jax.Array, w: ExpertWeights, clamp: float, normalize: bool) -> jax.Array:
    probabilities = jax.nn.softmax(x @ w.router + w.router_bias[None, None])
    _, chosen = jax.lax.top_k(probabilities, CHOSEN)
    shares = probabilities * jax.nn.one_hot(chosen, EXPERTS).sum(-2)
    if normalize:
        shares /= shares.sum(-1, keepdims=True)
    y = jnp.zeros_like(x)
    for i in range(EXPERTS):
        hidden = x @ w.into[i] + w.into_bias[i][None, None]
        gate = x @ w.gate[i] + w.gate_bias[i][None, None]
        if clamp:
            gate = jnp.minimum(gate, clamp)
            units = (jnp.clip(hidden, -clamp, clamp) + 1) * gate / (1 + jnp.exp(-1.702 * gate))
        else:
            units = hidden * jax.nn.silu(gate)
        y += shares[..., i, None] * (units @ w.out[i] + w.out_bias[i][None, None])
    return y


# Two rows of the batch with one token have fewer experts than there are.
@pytest.mark.slow_cases("1-0.0", "100-0.0")
@pytest.mark.parametrize(("tokens", "clamp"), [(1, 0.0), (7, 1.5), (100, 0.0)])
def test_outputs_and_gradients_are_those_of_a_loop_over_all_experts(
    tokens: int, clamp: float
) -> None:
    x, weights = drawn(tokens)
    factors = jnp.asarray(np.random.default_rng(0).normal(size=x.shape), jnp.float32)
    unit, normalize = partial(gated_unit, name="silu", clamp=clamp), tokens > 1

    def real(x: jax.Array, weights: ExpertWeights) -> tuple[jax.Array, jax.Array]:
        y = apply_experts(x, weights, unit, CHOSEN, normalize)
        return jnp.sum(y * factors), y

    def loop(x: jax.Array, weights: ExpertWeights) -> tuple[jax.Array, jax.Array]:
        y = by_loop(x, weights, clamp, normalize)
        return jnp.sum(y * factors), y

    found, expected = (
        jax.jit(jax.value_and_grad(f, argnums=(0, 1), has_aux=True))(x, weights)
        for f in (real, loop)
    )
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        limit = TOLERANCE * max(1, np.abs(other).max())
        np.testing.assert_allclose(one, other, rtol=0, atol=limit)


def test_shares_are_of_all_experts_or_of_those_of_the_token() -> None:
    logits = jnp.log(jnp.asarray([0.1, 0.6, 0.3]))
    for normalize, expected in ((False, [0.6, 0.3]), (True, [2 / 3, 1 / 3])):
        chosen, shares = route(logits, 2, normalize)
        np.testing.assert_array_equal(chosen, [1, 2])
        np.testing.assert_allclose(shares, expected, rtol=1e-6)
