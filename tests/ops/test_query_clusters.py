"""Tests the hashes and the k-means of clustered attention."""

import jax
import jax.numpy as jnp
import numpy as np

from brt.config import Attention
from brt.layers.attention_kinds import clustered_config
from brt.ops.clustered_attention import (
    cluster_queries,
    hash_codes,
    kmeans,
    random_planes,
    reference,
)

BATCH, HEADS, TOKENS, WIDTH, CLUSTERS = 2, 2, 40, 8, 6
CONFIG = clustered_config(Attention(kind="clustered", clusters=CLUSTERS))
LENGTHS = np.array([40, 23])
VALID = np.arange(TOKENS)[None] < LENGTHS[:, None]
find = jax.jit(kmeans, static_argnames=("iterations", "implementation"))
cluster = jax.jit(cluster_queries, static_argnames="config")


def queries() -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.normal(size=(BATCH, HEADS, TOKENS, WIDTH)).astype(np.float32)


def test_hash_is_bit_by_bit_the_side_of_a_plane() -> None:
    planes = random_planes(jax.random.key(0), bits=63, width=WIDTH, offsets=True)
    codes = jax.jit(hash_codes)(queries(), planes)
    expected = jax.jit(reference.hash_codes)(queries(), *planes)
    np.testing.assert_array_equal(codes, expected)
    assert set(np.unique(codes)) == {-1.0, 1.0} and np.any(planes.offsets)


def test_planes_through_the_origin_hash_by_angle() -> None:
    planes = random_planes(jax.random.key(0), bits=63, width=WIDTH, offsets=False)
    x = jnp.asarray(queries())
    codes = np.asarray(hash_codes(x, planes))
    np.testing.assert_array_equal(hash_codes(1024 * x, planes), codes)
    np.testing.assert_array_equal(hash_codes(-x, planes), -codes)


def test_ties_and_empty_clusters_are_settled_the_same_way() -> None:
    one = np.ones((1, 1, 1, 4), np.float32)
    codes = np.concatenate([one, -one], axis=2)
    valid, active = np.ones((1, 2), bool), np.ones((1, 3), bool)
    far = one * np.array([1, -1, 1, -1], np.float32)  # Differs in two bits from both queries.
    centroids = np.concatenate([far, far, -far], axis=2)
    labels, last = find(codes, valid, centroids, active, iterations=2)
    # Both queries join the first centroid, whose bits then tie. The other centroids do not change.
    np.testing.assert_array_equal(last[0, 0], np.stack([-np.ones(4), far[0, 0, 0], -far[0, 0, 0]]))
    np.testing.assert_array_equal(labels, [[[1, 0]]])


def test_queries_of_the_same_direction_share_a_cluster() -> None:
    rng = np.random.default_rng(0)
    centers, own = rng.normal(size=(3, WIDTH)), rng.integers(3, size=TOKENS)
    q = centers[own] + 1e-3 * rng.normal(size=(BATCH, HEADS, TOKENS, WIDTH))
    config = clustered_config(Attention(kind="clustered", clusters=12))
    labels = np.asarray(cluster(q.astype(np.float32), VALID, config, jax.random.key(0)))
    for b, h in np.ndindex(BATCH, HEADS):
        found = labels[b, h, : LENGTHS[b]]
        pairs = {*zip(found.tolist(), own[: LENGTHS[b]].tolist(), strict=True)}
        assert len(pairs) == len({*found.tolist()})  # A cluster holds queries of one direction.


def test_labels_depend_on_an_examples_own_queries_alone() -> None:
    """Labels do not depend on the scale, the content or amount of padding, or other examples."""
    q, key = queries(), jax.random.key(0)
    labels = cluster(q, VALID, CONFIG, key)
    np.testing.assert_array_equal(cluster(1024 * q, VALID, CONFIG, key), labels)
    spoilt = np.where(VALID[:, None, :, None], q, np.float32(np.nan))
    np.testing.assert_array_equal(cluster(spoilt, VALID, CONFIG, key), labels)
    short = cluster(q[1:, :, :23], VALID[1:, :23], CONFIG, key)
    np.testing.assert_array_equal(short, labels[1:, :, :23])


def test_no_more_clusters_than_queries() -> None:
    few = np.arange(TOKENS)[None] < np.array([[3], [0]])
    labels = np.asarray(cluster(queries(), few, CONFIG, jax.random.key(0)))
    assert np.all(labels[0, :, :3] < 3) and np.all(labels[0, :, 3:] == CLUSTERS)
    assert np.all(labels[1] == CLUSTERS)
    short = np.asarray(cluster(queries()[:, :, :4], VALID[:, :4], CONFIG, jax.random.key(0)))
    assert short.max() < 4
    for head in short.reshape(-1, 4):
        assert len({*head.tolist()}) == 4  # Every query is a cluster.
