"""K-means of hash codes in Hamming space (section 3.2 of the paper).

With codes of +1 and -1 the Hamming distance is (P - x.c) / 2, so both steps of k-means are
matrix products, exact in any precision.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.config import Attention
from brt.ops.clustered_attention.hashing import hash_codes, random_planes, unit_scale
from brt.ops.top_k import top_k


def cluster_queries(
    queries: Float[Array, "B H T K"],
    valid: Bool[Array, "B T"],
    config: Attention,
    key: jax.Array,
) -> Int[Array, "B H T"]:
    """Labels of the queries, int32: a cluster from 0 on, or for padding the number of clusters.

    There are min(`config.clusters`, T) of them; an example with fewer queries uses no more than
    it has. Labels of an example depend on its own queries and on the key alone, neither on the
    rest of the batch nor on padding, and are constants to differentiation.
    """
    queries = jax.lax.stop_gradient(queries)
    tokens, width = queries.shape[2:]
    clusters = min(config.clusters, tokens)
    of_planes, of_order = jax.random.split(key)
    planes = random_planes(of_planes, bits=config.bits, width=width, offsets=config.hash_offsets)
    codes = hash_codes(unit_scale(queries, valid), planes).astype(queries.dtype)
    chosen = _random_order(of_order, valid, max(clusters, min(config.fit_queries, tokens)))
    sample = jnp.take_along_axis(codes, chosen[:, None, :, None], axis=2)
    count = jnp.sum(valid, axis=1)[:, None]
    active = jnp.broadcast_to(jnp.arange(clusters)[None] < count, (len(valid), clusters))
    learned, exist = codes, valid
    if config.fit_queries:
        learned, exist = sample, jnp.arange(sample.shape[2])[None] < count
    centroids = fit(learned, exist, sample[:, :, :clusters], active, steps=config.iterations - 1)
    return assign(codes, valid, centroids, active)


def kmeans(
    codes: Float[Array, "B H T P"],
    valid: Bool[Array, "B T"],
    centroids: Float[Array, "B H C P"],
    active: Bool[Array, "B C"],
    *,
    iterations: int,
) -> tuple[Int[Array, "B H T"], Float[Array, "B H C P"]]:
    """Lloyd's algorithm from the given centroids: so many assignments, an update between two.

    Args:
      codes: of +1 and -1.
      valid: False on padding, which no centroid learns from.
      active: False on clusters that stay empty.

    Returns:
      Labels, as those of `assign`, and the centroids that they were found by.
    """
    centroids = fit(codes, valid, centroids, active, steps=iterations - 1)
    return assign(codes, valid, centroids, active), centroids


def fit(
    codes: Float[Array, "B H T P"],
    valid: Bool[Array, "B T"],
    centroids: Float[Array, "B H C P"],
    active: Bool[Array, "B C"],
    *,
    steps: int,
) -> Float[Array, "B H C P"]:
    """The centroids after so many steps, each an assignment and an update."""

    def step(_: Array | int, centroids: Array) -> Array:
        return _update(codes, assign(codes, valid, centroids, active), centroids)

    return jax.lax.fori_loop(0, steps, step, centroids)


def assign(
    codes: Float[Array, "B H T P"],
    valid: Bool[Array, "B T"],
    centroids: Float[Array, "B H C P"],
    active: Bool[Array, "B C"],
) -> Int[Array, "B H T"]:
    """The nearest active centroid, the first of several; C for padding. int32."""
    clusters = centroids.shape[2]
    agreement = jnp.einsum("bhcp,bhtp->bhct", centroids, codes, preferred_element_type=jnp.float32)
    # One maximum finds the best and, among equals, the first: both are integers. XLA's CPU
    # backend takes many times longer for an argmax.
    ranked = agreement * clusters - jnp.arange(clusters, dtype=jnp.float32)[None, None, :, None]
    ranked = jnp.where(active[:, None, :, None], ranked, -jnp.inf)
    best = jnp.max(ranked, axis=2)
    labels = -jnp.where(jnp.isfinite(best), best, 0).astype(jnp.int32) % clusters
    return jnp.where(valid[:, None], labels, clusters)


def _update(
    codes: Float[Array, "B H T P"],
    labels: Int[Array, "B H T"],
    centroids: Float[Array, "B H C P"],
) -> Float[Array, "B H C P"]:
    """The majority of the members, bit by bit, -1 where they tie; an empty cluster stays."""
    clusters = jnp.arange(centroids.shape[2])[None, None, :, None]
    member = labels[:, :, None] == clusters
    votes = jnp.einsum(
        "bhct,bhtp->bhcp", member.astype(codes.dtype), codes, preferred_element_type=jnp.float32
    )
    majority = jnp.where(votes > 0, 1, -1).astype(centroids.dtype)
    return jnp.where(jnp.any(member, axis=-1, keepdims=True), majority, centroids)


def _random_order(key: jax.Array, valid: Bool[Array, "B T"], count: int) -> Int[Array, "B R"]:
    """`count` positions in random order, none twice, valid ones first.

    The random number of a position does not depend on how many there are.
    """
    positions = jnp.arange(valid.shape[1])
    draw = jax.vmap(lambda position: jax.random.uniform(jax.random.fold_in(key, position)))
    numbers = jnp.where(valid, draw(positions)[None], -1.0)
    return top_k(numbers, count)[1]
