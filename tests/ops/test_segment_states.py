"""Tests the TPU kernel of the recurrence's output in an interpreter on CPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt.config import Mesh
from brt.distributed.mesh import build
from brt.ops.segmented_recurrent_attention.states_tpu import interpreted

TOLERANCE = {"float32": 1e-6, "bfloat16": 2e-2}
BATCH, TARGETS = 2, 24


def expected(queries: jax.Array, states: jax.Array, segment: jax.Array) -> jax.Array:
    """Returns the product of each query and the state of its segment, in plain XLA."""
    own = jax.nn.one_hot(segment, len(states), dtype=queries.dtype)
    return jnp.einsum("bthc,mbhce,btm->bthe", queries, states, own, precision="highest")


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
    found, pull = jax.vjp(lambda q, r: interpreted(q, r, segment), queries, states)
    wide = queries.astype(jnp.float32), states.astype(jnp.float32)
    right, pull_right = jax.vjp(lambda q, r: expected(q, r, segment), *wide)
    pairs = [
        (found, right),
        *zip(pull(gradient), pull_right(gradient.astype(jnp.float32)), strict=True),
    ]
    for ours, theirs in pairs:
        assert ours.dtype == dtype
        error = np.abs(np.asarray(ours, np.float32) - np.asarray(theirs))
        assert error.max() <= TOLERANCE[dtype] * np.abs(theirs).max()


@pytest.mark.slow  # tests/sharded/test_equality.py compares whole runs on several devices.
def test_devices_that_share_sources_and_heads_equal_one() -> None:
    rng = np.random.default_rng(0)
    queries = jnp.asarray(rng.normal(size=(4, 8, 4, 64)), jnp.float32)
    states = jnp.asarray(rng.normal(size=(3, 4, 4, 64, 64)), jnp.float32)
    segment = jnp.asarray(rng.integers(3, size=(4, 8)), jnp.int32)
    with jax.set_mesh(build(Mesh(data=2, tensor=2), {})):
        found = jax.jit(interpreted)(queries, states, segment)
    np.testing.assert_allclose(found, expected(queries, states, segment), rtol=1e-5, atol=1e-5)


def test_a_state_that_no_query_reads_has_no_gradient() -> None:
    queries, states = jnp.ones((1, 8, 2, 64)), jnp.ones((4, 1, 2, 64, 64))
    segment = jnp.full((1, 8), 2)
    gradient = jax.grad(lambda r: interpreted(queries, r, segment).sum())(states)
    assert jnp.all(gradient[2] == 8) and not jnp.any(gradient[jnp.array([0, 1, 3])])
