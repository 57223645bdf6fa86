"""Tests the TPU kernel of the recurrence's output in an interpreter on CPUs."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt.ops.cross_attention.states_tpu import interpreted

TOLERANCE = {"float32": 1e-6, "bfloat16": 2e-2}
BATCH, TARGETS = 2, 24


def expected(queries: jax.Array, states: jax.Array, segment: jax.Array) -> jax.Array:
    """Returns the product of each query and the state of its segment, in plain XLA."""
    own = jax.nn.one_hot(segment, len(states), dtype=queries.dtype)
    return jnp.einsum("bthc,mbhce,btm->bthe", queries, states, own, precision="highest")


@pytest.mark.slow_cases("a head-*")
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("heads", "width", "segments"),
    [(4, 64, 3), (2, 128, 5), (3, 64, 1), (2, 64, 34)],
    ids=["pairs of heads", "a head", "an odd number of heads", "a loop over segments"],
)
def test_queries_read_the_state_of_their_segment(
    heads: int, width: int, segments: int, dtype: str
) -> None:
    rng = np.random.default_rng(0)
    queries, gradient = (
        jnp.asarray(rng.normal(size=(BATCH, TARGETS, heads, width)), dtype) for _ in range(2)
    )
    states = jnp.asarray(rng.normal(size=(segments, BATCH, heads, width, width)), dtype)
    segment = jnp.asarray(rng.integers(segments, size=(BATCH, TARGETS)), jnp.int32)

    def both(product: Callable, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        @jax.jit
        def run(queries: jax.Array, states: jax.Array, gradient: jax.Array) -> tuple:
            y, pull = jax.vjp(lambda q, r: product(q, r, segment), queries, states)
            return y, *pull(gradient)

        return run(*arrays)

    arrays = queries, states, gradient
    found = both(interpreted, *arrays)
    wanted = both(expected, *(x.astype(jnp.float32) for x in arrays))
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == dtype
        error = np.abs(np.asarray(ours, np.float32) - np.asarray(theirs))
        assert error.max() <= TOLERANCE[dtype] * np.abs(theirs).max()
