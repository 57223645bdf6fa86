"""Tests which keys a routed token reads, and that they do not depend on later tokens."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt.memories.routed_attention import (
    ClusterStatistics,
    Rings,
    RoutedTokens,
    add_tokens,
    nearest_clusters,
    new_statistics,
    rings_after,
    routed_attention,
    routed_attention_step,
    update_averages,
)
from brt.ops.normalization import l2_normalize

TOLERANCE = 1e-5  # absolute, float32; the compared values have magnitude 1
LANES, WINDOW, BLOCKS, HEADS, SIZE, CLUSTERS, KEPT = 2, 6, 4, 2, 4, 3, 5
TOKENS = WINDOW * BLOCKS
NOWHERE = np.zeros((LANES, BLOCKS), bool)
BIAS = jnp.asarray(np.random.default_rng(9).normal(size=(HEADS, KEPT)), jnp.float32)
STATISTICS = new_statistics(HEADS, CLUSTERS, SIZE)


def queries(seed: int = 0) -> jax.Array:
    drawn = np.random.default_rng(seed).normal(size=(LANES, TOKENS, HEADS, SIZE))
    return l2_normalize(jnp.asarray(drawn, jnp.float32))


def routed(q: jax.Array, values: jax.Array | None = None) -> RoutedTokens:
    """Returns tokens whose keys are `q`, in the clusters with the nearest centroids."""
    return RoutedTokens(
        q, queries(100) if values is None else values, nearest_clusters(q, STATISTICS)
    )


def new_rings(clusters: int = CLUSTERS, kept: int = KEPT) -> Rings:
    zeros = jnp.zeros((LANES, HEADS, clusters, kept, SIZE))
    return Rings(zeros, zeros, jnp.zeros((LANES, HEADS, clusters), jnp.int32))


@functools.cache
def compiled(name: str | None) -> Callable:
    def read(q: Any, tokens: Any, rings: Any, start: Any, bias: Any) -> tuple:
        y = routed_attention(q, tokens, rings, start, bias, implementation=name)
        return y, rings_after(tokens, rings, start)

    return jax.jit(read)


def read(
    tokens: RoutedTokens, rings: Rings | None = None, start: np.ndarray = NOWHERE,
    bias: jax.Array = BIAS, name: str | None = None,
) -> tuple[np.ndarray, Rings]:  # fmt: skip
    """Returns the output of the attention, and the rings of stored keys after the segment."""
    rings = new_rings() if rings is None else rings
    y, after = compiled(name)(2 * tokens.keys, tokens, rings, jnp.asarray(start), bias)
    return np.asarray(y), after


def test_a_token_reads_the_last_ones_of_its_cluster_in_its_document() -> None:
    """Compares with a loop over tokens; in lane 1 a document starts in the third block."""
    start = NOWHERE.copy()
    start[1, 2] = True
    tokens = routed(queries())
    y, rings = read(tokens, start=start)
    keys, values, clusters = map(np.asarray, tokens)
    for lane in range(LANES):
        for head in range(HEADS):
            own: dict[int, list[int]] = {c: [] for c in range(CLUSTERS)}
            for t in range(TOKENS):
                if t % WINDOW == 0 and start[lane, t // WINDOW]:
                    own = {c: [] for c in own}
                mates = own[int(clusters[lane, t, head])]
                mates.append(t)
                del mates[:-KEPT]
                logits = [2 * keys[lane, t, head] @ keys[lane, i, head] for i in mates]
                logits = np.array(logits) + np.asarray(BIAS)[head, len(mates) - 1 :: -1]
                weights = np.exp(logits - logits.max())
                found = weights @ values[lane, mates, head] / weights.sum()
                np.testing.assert_allclose(y[lane, t, head], found, atol=TOLERANCE)
            for c, mates in own.items():
                assert int(rings.filled[lane, head, c]) == len(mates)
                kept = np.zeros((KEPT, SIZE), np.float32)
                kept[KEPT - len(mates) :] = keys[lane, mates, head]
                np.testing.assert_array_equal(rings.keys[lane, head, c], kept)


@pytest.mark.slow_cases("reference")
@pytest.mark.parametrize("name", ["reference", "xla"])
def test_no_output_hangs_on_a_later_token_bit_by_bit(name: str) -> None:
    base, _ = read(routed(queries()), name=name)
    moved = 0
    for place in range(1, TOKENS):
        changed = queries().at[:, place].set(queries(1)[:, place])
        tokens = routed(changed)
        moved += int(np.any(tokens.clusters != routed(queries()).clusters))
        found, _ = read(tokens, name=name)
        np.testing.assert_array_equal(found[:, :place], base[:, :place])
        assert np.any(found[:, place] != base[:, place])
    assert moved > TOKENS / 3, "tokens have gone to other clusters"


def test_there_is_room_for_documents_of_a_block_each_behind_full_rings() -> None:
    """Uses the most clusters and documents possible, none of which fills its last chunk."""
    rings = Rings(*(x + 1 for x in new_rings()[:2]), new_rings().filled + KEPT)
    clusters = jnp.arange(TOKENS)[None, :, None] % CLUSTERS
    tokens = routed(queries())._replace(
        clusters=jnp.broadcast_to(clusters, (LANES, TOKENS, HEADS)).astype(jnp.int32)
    )
    first_too = np.array([[True], [False]])
    start = np.concatenate([first_too, np.ones((LANES, BLOCKS - 1), bool)], axis=1)
    (y, after), (expected, others) = (
        read(tokens, rings, start, name=name) for name in (None, "reference")
    )
    np.testing.assert_allclose(y, expected, atol=TOLERANCE)
    jax.tree.map(np.testing.assert_array_equal, after, others)


@pytest.mark.slow_cases("False")
@pytest.mark.parametrize("itself", [True, False])
def test_segments_and_tokens_one_by_one_read_the_same(itself: bool) -> None:
    tokens, rings = routed(queries()), new_rings()
    q = 2 * tokens.keys
    start = jnp.asarray(NOWHERE)
    attend = jax.jit(functools.partial(routed_attention, attend_to_self=itself))
    whole = attend(q, tokens, rings, start, BIAS)
    step = jax.jit(functools.partial(routed_attention_step, attend_to_self=itself))
    shift = jax.jit(rings_after)
    q, pieces, found = np.asarray(q), jax.tree.map(np.asarray, tokens), []
    for n in range(BLOCKS):
        block = jax.tree.map(lambda x, n=n: x[:, n * WINDOW : (n + 1) * WINDOW], pieces)
        for place in range(WINDOW):
            own = q[:, n * WINDOW + place, None]
            cluster = block.clusters[:, place]
            found.append(step(own, cluster, block, rings, np.full(LANES, place, np.int32), BIAS))
        rings = shift(block, rings, np.zeros((LANES, 1), bool))
    np.testing.assert_allclose(np.concatenate(found, axis=1), whole, atol=TOLERANCE)
    after = shift(tokens, new_rings(), start)
    jax.tree.map(np.testing.assert_array_equal, rings, after)


def test_centres_are_moving_averages_and_one_without_tokens_stays() -> None:
    statistics, decay = STATISTICS, 0.9
    counts, sums = (np.array(x, np.float64) for x in statistics[:2])
    for seed in range(3):
        q = queries(seed)
        clusters = jnp.minimum(
            nearest_clusters(q, statistics), CLUSTERS - 2
        )  # The last cluster gets no tokens.
        # Tokens may be added in two parts before the averages are updated.
        for half in (slice(0, 1), slice(1, None)):
            statistics = add_tokens(statistics, q[half], clusters[half])
        statistics = update_averages(statistics, decay)
        for head in range(HEADS):
            for c in range(CLUSTERS - 1):
                mine = np.asarray(q)[:, :, head][np.asarray(clusters)[:, :, head] == c]
                counts[head, c] = decay * counts[head, c] + (1 - decay) * len(mine)
                sums[head, c] = decay * sums[head, c] + (1 - decay) * mine.sum(0)
    np.testing.assert_allclose(statistics.counts, counts, rtol=1e-5)
    np.testing.assert_allclose(statistics.sums, sums, atol=TOLERANCE)
    np.testing.assert_array_equal(statistics.sums[:, -1], STATISTICS.sums[:, -1])
    assert not any(map(np.any, statistics[2:]))


def test_clusters_are_found_by_direction_whatever_a_centres_length() -> None:
    longer = STATISTICS._replace(sums=STATISTICS.sums * jnp.asarray([[[1.0], [50.0], [3.0]]]))
    np.testing.assert_array_equal(
        nearest_clusters(queries(), longer), nearest_clusters(queries(), STATISTICS)
    )
    assert isinstance(longer, ClusterStatistics)
