"""Clustering of queries by k-means of their hash codes (Vyas et al. 2020, section 3.2).

A code is a vector of +1 and -1, and the distance of two codes is the number of bits in which they
differ. To compute distances, codes are packed to words of 32 bits. On CPUs, this takes a quarter of
the time of products of the vectors.

In shapes, P is the number of bits of a code, W the number of its words, and C the number of
clusters.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from brt.ops import dispatch
from brt.ops.clustered_attention import reference
from brt.ops.clustered_attention.config import ClusteredConfig, Codes
from brt.ops.clustered_attention.hashing import hash_codes, random_planes, unit_scale
from brt.ops.clustered_attention.members import cluster_sums, member_counts
from brt.ops.dispatch import Implementation, Op
from brt.ops.top_k import top_k

# A hash code has this many bits, as in the authors' code, which stores a code in a 64-bit integer.
HASH_BITS = 63
ITERATIONS = 5  # k-means runs for this many iterations; the authors' code has 10


def cluster_queries(
    queries: Float[Array, "B H T K"],
    valid: Bool[Array, "B T"],
    config: ClusteredConfig,
    key: jax.Array,
    *,
    implementation: str | None = None,
) -> Int[Array, "B H T"]:
    """Hashes the queries and returns the cluster of each, from k-means of the hash codes.

    There are C = min(`config.clusters`, T) clusters, and padding gets the label C. An example with
    fewer queries uses at most one cluster per query. The result for an example does not depend on
    the rest of the batch or padding, and has no gradient.
    """
    queries = jax.lax.stop_gradient(queries)
    tokens, width = queries.shape[2:]
    clusters = min(config.clusters, tokens)
    planes_key, order_key = jax.random.split(key)
    planes = random_planes(planes_key, bits=HASH_BITS, width=width, offsets=True)
    planes = jax.tree.map(_pad_to_words, planes)
    codes = hash_codes(unit_scale(queries, valid), planes)
    chosen = _random_order(order_key, valid, clusters)
    centroids = jnp.take_along_axis(codes, chosen[:, None, :, None], axis=2)
    count = jnp.sum(valid, axis=1)[:, None]
    active = jnp.broadcast_to(jnp.arange(clusters)[None] < count, (len(valid), clusters))
    labels, _ = kmeans(
        codes, valid, centroids, active, iterations=ITERATIONS, implementation=implementation
    )
    return labels


def kmeans(
    codes: Float[Array, "B H T P"],
    valid: Bool[Array, "B T"],
    centroids: Float[Array, "B H C P"],
    active: Bool[Array, "B C"],
    *,
    iterations: int,
    implementation: str | None = None,
) -> tuple[Int[Array, "B H T"], Float[Array, "B H C P"]]:
    """Clusters hash codes by Lloyd's algorithm, with the number of different bits as the distance.

    Codes are assigned to the nearest centroids `iterations` times. Between two assignments, each
    bit of a centroid becomes the majority of this bit in the cluster's codes, or -1 for a tie.
    Empty clusters keep their centroid. Codes are assigned only to clusters that are `active`.

    Returns the cluster of each code (C for padding), and the centroids that the last assignment
    used. Neither result has a gradient.
    """
    codes, centroids = map(jax.lax.stop_gradient, (codes, centroids))
    inputs = Codes(codes, valid, centroids, active)
    return dispatch.run(OP, implementation, inputs, iterations=iterations)


def _kmeans(
    inputs: Codes, *, iterations: int
) -> tuple[Int[Array, "B H T"], Float[Array, "B H C P"]]:
    codes, valid, centroids, active = inputs
    words = pack_codes(codes)

    def update_centroids(_: Array | int, centroids: Array) -> Array:
        return _update_centroids(
            codes, nearest_centroids(words, valid, pack_codes(centroids), active), centroids
        )

    centroids = jax.lax.fori_loop(0, iterations - 1, update_centroids, centroids)
    return nearest_centroids(words, valid, pack_codes(centroids), active), centroids


OP = Op("kmeans", (Implementation("xla", _kmeans), Implementation("reference", reference.kmeans)))


def nearest_centroids(
    codes: UInt32[Array, "B H W T"],
    valid: Bool[Array, "B T"],
    centroids: UInt32[Array, "B H W C"],
    active: Bool[Array, "B C"],
) -> Int[Array, "B H T"]:
    """Returns the index of each code's nearest active centroid; C for padding.

    The codes are packed. Of several nearest centroids, the first one is taken.
    """
    clusters = centroids.shape[-1]
    pairs = (codes[:, :, i, None] ^ centroids[:, :, i, :, None] for i in range(codes.shape[2]))
    distance = sum(jax.lax.population_count(pair).astype(jnp.int32) for pair in pairs)
    # The distance and the index of a centroid are combined to one number, so that a minimum yields
    # the nearest centroid and, among equally near ones, the first. XLA's CPU backend takes many
    # times longer for an argmin.
    ranked = distance * clusters + jnp.arange(clusters, dtype=jnp.int32)[None, None, :, None]
    ranked = jnp.where(active[:, None, :, None], ranked, jnp.iinfo(jnp.int32).max)
    return jnp.where(valid[:, None], jnp.min(ranked, axis=2) % clusters, clusters)


def _update_centroids(
    codes: Float[Array, "B H T P"],
    labels: Int[Array, "B H T"],
    centroids: Float[Array, "B H C P"],
) -> Float[Array, "B H C P"]:
    clusters = centroids.shape[2]
    majority = jnp.where(cluster_sums(codes, labels, clusters) > 0, 1, -1).astype(centroids.dtype)
    return jnp.where(member_counts(labels, clusters)[..., None] > 0, majority, centroids)


def pack_codes(codes: Float[Array, "B H T P"]) -> UInt32[Array, "B H W T"]:
    """Returns codes packed to words of 32 bits; a bit is set where the number is positive.

    The first number of a code is the lowest bit of the code's first word.
    """
    return jnp.stack(
        [_word(codes[..., i : i + 32] > 0) for i in range(0, codes.shape[-1], 32)], axis=2
    )


def _word(bits: Bool[Array, "B H T P"]) -> UInt32[Array, "B H T"]:
    ones = bits.astype(jnp.uint32)
    places = jax.lax.broadcasted_iota(jnp.uint32, ones.shape, ones.ndim - 1)
    return jnp.sum(ones << places, axis=-1, dtype=jnp.uint32)


def _pad_to_words(x: Float[Array, "P *K"]) -> Float[Array, "Q *K"]:
    # A number of bits that is no multiple of 32 takes longer, so planes of zeros are added, up
    # to Q planes. They do not change the clusters, because all vectors have the same bit for such a
    # plane.
    return jnp.pad(x, ((0, -len(x) % 32), *((0, 0),) * (x.ndim - 1)))


def _random_order(key: jax.Array, valid: Bool[Array, "B T"], count: int) -> Int[Array, "B R"]:
    """Returns R = `count` different positions in random order, the valid ones first."""
    positions = jnp.arange(valid.shape[1])
    # The random number of a position does not depend on the number of positions.
    draw = jax.vmap(lambda position: jax.random.uniform(jax.random.fold_in(key, position)))
    numbers = jnp.where(valid, draw(positions)[None], -1.0)
    return top_k(numbers, count)[1]
