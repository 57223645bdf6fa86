import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt.ops.causal_clustered_attention import (
    CentroidMemory,
    Centroids,
    causal_clustered_attention,
    causal_clustered_attention_step,
    memory_after,
    memory_scan,
)
from brt.ops.softmax import FLOOR
from brt.ops.window_attention import ready_ring, ring_attention, window_part

TOLERANCE = 1e-5  # absolute, float32; the compared values have magnitude 1
LANES, WINDOW, BLOCKS, HEADS, SIZE, CLUSTERS, KEPT = 2, 6, 4, 2, 8, 4, 3
TOKENS = WINDOW * BLOCKS
NOWHERE = np.zeros((LANES, BLOCKS), bool)


class Inputs(NamedTuple):
    """The differentiable inputs; keys and values do not include the cached block."""

    queries: jax.Array
    keys: jax.Array
    values: jax.Array
    window_bias: jax.Array
    centroids: Centroids


def inputs(seed: int = 0, dtype: str = "float32") -> Inputs:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    tokens = [normal(LANES, TOKENS, HEADS, SIZE).astype(dtype) for _ in range(3)]
    fixed = np.random.default_rng(7)
    centroids = Centroids(
        jnp.asarray(fixed.normal(size=(HEADS, CLUSTERS, SIZE)), jnp.float32),
        jnp.asarray(fixed.uniform(0.1, 0.5, (HEADS, CLUSTERS)), jnp.float32),
    )
    bias = jnp.asarray(fixed.normal(size=(HEADS, WINDOW)), jnp.float32)
    return Inputs(*tokens, bias, centroids)


class State(NamedTuple):
    """State between segments: the keys and values of the last block, the mask of lanes where this
    block exists, and the memory of all earlier tokens.
    """

    keys: jax.Array
    values: jax.Array
    valid: jax.Array
    past: CentroidMemory


def new_state(kept: int = KEPT, dtype: str = "float32", fill: float = 0.0) -> State:
    """Returns the state before the first token. Entries that attention must not read are `fill`."""
    cache = jnp.full((LANES, WINDOW, HEADS, SIZE), fill, dtype)
    keys = jnp.full((LANES, HEADS, CLUSTERS, kept, SIZE), fill, dtype)
    rest = jnp.full((LANES, HEADS, CLUSTERS, SIZE), fill, jnp.float32)
    past = CentroidMemory(keys, keys, rest, rest[..., 0], jnp.zeros((LANES,), jnp.int32))
    return State(cache, cache, jnp.zeros((LANES,), bool), past)


@functools.partial(jax.jit, static_argnames=("attend_to_self", "implementation"))
def read(
    x: Inputs, state: State, start: jax.Array, *, attend_to_self: bool = True,
    implementation: str = "xla",
) -> tuple[jax.Array, State]:  # fmt: skip
    """Returns the outputs of a segment, and the state after it. `start` [lanes, blocks] marks the
    first blocks of documents.
    """
    keys = jnp.concatenate([state.keys, x.keys], axis=1)
    values = jnp.concatenate([state.values, x.values], axis=1)
    cache_mask = jnp.concatenate([state.valid[:, None] & ~start[:, :1], ~start[:, 1:]], axis=1)
    window = window_part(
        x.queries, (state.keys, state.values), x.keys, x.values, x.window_bias, cache_mask,
        attend_to_self=attend_to_self,
    )  # fmt: skip
    past, pasts = memory_scan(
        keys, values, cache_mask, state.past, x.centroids, implementation=implementation
    )
    y = causal_clustered_attention(
        x.queries, window, keys, values, cache_mask, pasts, x.centroids, x.window_bias[:, -1],
        attend_to_self=attend_to_self, implementation=implementation,
    )  # fmt: skip
    last = keys[:, -WINDOW:], values[:, -WINDOW:], jnp.ones((LANES,), bool)
    return y, State(*last, past)


@functools.partial(jax.jit, static_argnames=("attend_to_self",))
def exact(x: Inputs, document: jax.Array, *, attend_to_self: bool = True) -> tuple[jax.Array]:
    """Returns softmax attention to all earlier tokens of the same document, in float32.

    Keys beyond the window get the bias of the farthest key in the window.
    """
    place = np.arange(TOKENS)
    distance = place[:, None] - place[None] - (0 if attend_to_self else 1)
    seen = (distance >= 0)[None] & (document[:, :, None] == document[:, None])
    bias = x.window_bias[:, np.clip(distance, 0, WINDOW - 1)]
    logits = jnp.einsum("bqhk,bshk->bhqs", x.queries, x.keys) + bias[None]
    logits = jnp.where(seen[:, None], logits, -1e30)
    weights = jnp.where(seen[:, None], jax.nn.softmax(logits, axis=-1), 0)
    return (jnp.einsum("bhqs,bshk->bqhk", weights, x.values),)


def starts(*places: tuple[int, int]) -> np.ndarray:
    """Returns a boolean array [lanes, blocks] that is True at these (lane, block) pairs."""
    found = NOWHERE.copy()
    for place in places:
        found[place] = True
    return found


def assert_close(actual: Any, expected: Any, tolerance: float = TOLERANCE) -> None:
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, atol=tolerance), actual, expected)


def with_gradients(function: Callable) -> Callable:
    """Returns a jitted function that returns gradients and the results of `function`.

    The gradients with respect to the inputs are those of half the sum of squares of the first
    result.
    """

    @functools.partial(jax.jit, static_argnames=("implementation", "attend_to_self"))
    def run(x: Inputs, *arguments: Any, **options: Any) -> tuple[Inputs, Any]:
        def loss(x: Inputs) -> tuple[jax.Array, Any]:
            results = function(x, *arguments, **options)
            return jnp.sum(results[0] ** 2) / 2, results

        return jax.grad(loss, has_aux=True)(x)

    return run


read_with_gradients = with_gradients(read)


@pytest.fixture(scope="module")
def carried() -> State:
    """Returns the state after a segment, in which the memory has read more keys than it can
    keep.
    """
    return read(inputs(1), new_state(), starts((1, 3)))[1]


@pytest.mark.slow  # The next test also compares with exact attention, and is quick.
def test_centroids_that_keep_every_key_give_exact_attention_to_the_whole_past() -> None:
    start = starts((0, 0), (1, 0), (1, 2))
    document = np.repeat(np.cumsum(start, axis=1), WINDOW, axis=1)
    state = new_state(kept=TOKENS, fill=3.0)
    gradients, (y, _) = read_with_gradients(inputs(), state, start)
    expected_gradients, (expected,) = with_gradients(exact)(inputs(), document)
    assert_close(y, expected)
    assert_close(gradients[:4], expected_gradients[:4], 5e-5)
    assert not any(np.any(leaf) for leaf in gradients.centroids), "they only choose"
    strict = {"attend_to_self": False}
    assert_close(read(inputs(), state, start, **strict)[0], exact(inputs(), document, **strict)[0])


@pytest.mark.slow
def test_queries_at_a_centroid_read_exactly_what_it_sums_up() -> None:
    """The logits of such queries are those of the centroid, and the variance around it is 0."""
    x = inputs()
    label = np.random.default_rng(3).integers(CLUSTERS, size=(LANES, TOKENS, HEADS))
    queries = x.centroids.vectors[np.arange(HEADS)[None, None], label]
    without = x.centroids._replace(variances=jnp.zeros((HEADS, CLUSTERS)))
    x = x._replace(queries=queries, centroids=without)
    y, _ = read(x, new_state(), NOWHERE)
    assert_close(y, exact(x, np.zeros((LANES, TOKENS), int))[0])


def test_the_variance_makes_up_for_the_spread_of_queries() -> None:
    """Queries are normally distributed around one centroid c, with the variance var. The mean of
    exp(q.k) is then exp(c.k + var |k|^2 / 2).
    """
    rng, variance = np.random.default_rng(0), 0.3
    centre, key = rng.normal(size=SIZE), rng.normal(size=SIZE)
    drawn = centre + variance**0.5 * rng.normal(size=(200_000, SIZE))
    expected = np.log(np.mean(np.exp(drawn @ key)))
    centroids = Centroids(
        jnp.tile(jnp.asarray(centre, jnp.float32), (HEADS, CLUSTERS, 1)),
        jnp.full((HEADS, CLUSTERS), variance),
    )
    past = new_state(kept=1).past
    keys = jnp.tile(jnp.asarray(key, jnp.float32), (LANES, HEADS, WINDOW, 1))
    after = jax.jit(memory_after)(past, keys, keys, jnp.ones((LANES,), bool), centroids)
    others = WINDOW - 1  # The memory keeps one key and sums up the others.
    np.testing.assert_allclose(after.lse - np.log(others), expected, atol=0.02)
    assert_close(after.rest, jnp.broadcast_to(keys[0, 0, 0], after.rest.shape))


def test_outputs_are_bitwise_the_same_whatever_comes_after_them() -> None:
    state, fixed = new_state(), inputs()[3:]
    first, second = (jax.tree.map(np.asarray, inputs(seed)[:3]) for seed in (0, 5))
    base = np.asarray(read(Inputs(*first, *fixed), state, starts((1, 2)))[0])
    for t in (0, 1, WINDOW - 1, WINDOW, 2 * WINDOW + 3, 3 * WINDOW, TOKENS - 1):
        later = np.arange(TOKENS)[None, :, None, None] >= t
        changed = (np.where(later, b, a) for a, b in zip(first, second, strict=True))
        y = np.asarray(read(Inputs(*changed, *fixed), state, starts((1, 2)))[0])
        np.testing.assert_array_equal(y[:, :t], base[:, :t])
        assert np.all(np.any(y[:, t:] != base[:, t:], axis=(2, 3)))


def test_every_token_of_the_past_counts_and_nothing_of_other_documents() -> None:
    start = starts((1, 2))

    @jax.jit
    def sensitivity(values: jax.Array) -> jax.Array:
        """Returns the magnitudes of derivatives, [reading token, lane, token that is read].

        Outputs may be summed over lanes, because no output depends on the values of another lane.
        """

        def outputs(values: jax.Array) -> jax.Array:
            return read(inputs()._replace(values=values), new_state(), start)[0].sum((0, 2, 3))

        return jnp.abs(jax.jacrev(outputs)(values)).sum((3, 4))

    depends = np.asarray(sensitivity(inputs().values)) > 0
    causal, second = np.tri(TOKENS, dtype=bool), np.arange(TOKENS) >= 2 * WINDOW
    np.testing.assert_array_equal(depends[:, 0], causal)
    np.testing.assert_array_equal(depends[:, 1], causal & (second[:, None] == second[None]))


def part_of(x: Inputs, tokens: slice) -> Inputs:
    """Returns the inputs of some tokens only."""
    return Inputs(*(leaf[:, tokens] for leaf in x[:3]), *x[3:])


def test_segments_with_carried_state_equal_one_long_segment(carried: State) -> None:
    start = starts((0, 3), (1, 1))
    expected = read(inputs(), carried, start)
    state, outputs = carried, []
    for first, last in ((0, 2), (2, 4)):
        part = part_of(inputs(), slice(first * WINDOW, last * WINDOW))
        y, state = read(part, state, start[:, first:last])
        outputs.append(y)
    assert_close((jnp.concatenate(outputs, axis=1), state), expected)


def test_a_document_knows_nothing_of_what_was_read_before_it(carried: State) -> None:
    start = starts((0, 0), (1, 0))
    fresh = read(inputs(), new_state(fill=3.0), NOWHERE)
    after = read(inputs(), carried, start)
    jax.tree.map(np.testing.assert_array_equal, after, fresh)
    assert np.abs(read(inputs(), carried, NOWHERE)[0] - fresh[0]).max() > 0.01


def test_the_state_has_one_size_and_begins_with_what_there_is(carried: State) -> None:
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), new_state())
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), carried) == shapes
    # The memory reads one block, which has fewer keys than it can keep.
    block = (x[:, :WINDOW].swapaxes(1, 2) for x in (inputs().keys, inputs().values))
    known = jnp.ones((LANES,), bool)
    past = jax.jit(memory_after)(new_state(kept=8).past, *block, known, inputs().centroids)
    assert past.filled.tolist() == [WINDOW, WINDOW]
    assert np.all(np.any(past.keys[:, :, :, :WINDOW], axis=-1))
    assert not np.any(past.keys[:, :, :, WINDOW:]) and not np.any(past.rest)
    np.testing.assert_array_equal(past.lse, FLOOR)


@pytest.mark.slow  # tests/layers/test_every_kind.py reads documents token by token, too.
def test_token_by_token_is_the_whole_segment(carried: State) -> None:
    """Tokens do not attend to themselves here. The tests in tests/generation let tokens do so."""
    x, attend_to_self = inputs(), False
    expected, after = read(x, carried, NOWHERE, attend_to_self=attend_to_self)

    @jax.jit
    def step(state: State, ring: tuple, t: jax.Array, position: jax.Array) -> tuple:
        q, *kv = (jax.lax.dynamic_slice_in_dim(z, t, 1, axis=1) for z in x[:3])
        written = [
            jax.lax.dynamic_update_slice_in_dim(r, z, position, axis=1)
            for r, z in zip(ring, kv, strict=True)
        ]
        ready, positions = ready_ring(*ring), jnp.full(len(q), position)
        window = ring_attention(
            q, ready, tuple(kv), x.window_bias, WINDOW * state.valid + position, positions,
            attend_to_self=attend_to_self,
        )  # fmt: skip
        y = causal_clustered_attention_step(
            q, window, state.keys, state.values, state.valid, positions, state.past, x.centroids,
            x.window_bias[:, -1], attend_to_self=attend_to_self,
        )  # fmt: skip
        return y, tuple(written)

    state, outputs = carried, []
    for block in range(BLOCKS):
        ring = state.keys, state.values
        for position in range(WINDOW):
            y, ring = step(state, ring, jnp.int32(block * WINDOW + position), jnp.int32(position))
            outputs.append(y)
        by_head = (z.swapaxes(1, 2) for z in (state.keys, state.values))
        past = jax.jit(memory_after)(state.past, *by_head, state.valid, x.centroids)
        state = State(*ring, state.valid, past)
    assert_close((jnp.concatenate(outputs, axis=1), state), (expected, after))


def test_bfloat16_is_close_to_float32() -> None:
    low = inputs(dtype="bfloat16")
    y, state = read(low, new_state(dtype="bfloat16"), NOWHERE)
    assert y.dtype == state.past.keys.dtype == jnp.bfloat16
    assert state.past.lse.dtype == state.past.rest.dtype == jnp.float32
    high = Inputs(*(leaf.astype(jnp.float32) for leaf in low[:3]), *low[3:])
    expected, _ = read(high, new_state(), NOWHERE)
    error = np.abs(np.asarray(y, np.float32) - expected)
    assert error.mean() < 0.01 and np.quantile(error, 0.99) < 0.05
