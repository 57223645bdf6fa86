"""Centroids of clusters of tokens: means of their queries, learned without gradients.

Counts and sums are moving averages over steps (Routing Transformers, section 4.1, spherical
k-means). Sums start as unit vectors and counts as 1, so that no sum is divided by almost zero at
first. Only directions decide, so no cluster attracts tokens by its length.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from brt.ops.normalization import l2_normalize


class ClusterStatistics(NamedTuple):
    """Float32 statistics of C clusters of each head.

    Attributes:
      counts: [*L, H, C], the average number of tokens of a step.
      sums: [*L, H, C, K], the average sum of their queries; `sums / counts` are the centroids.
      new_counts, new_sums: those of the tokens since the last `update_averages`, which alone moves
        centroids.
    """

    counts: Float[Array, "*L H C"]
    sums: Float[Array, "*L H C K"]
    new_counts: Float[Array, "*L H C"]
    new_sums: Float[Array, "*L H C K"]


def new_statistics(heads: int, clusters: int, width: int) -> ClusterStatistics:
    """Returns statistics without tokens; the directions are random but always the same."""
    drawn = np.random.default_rng(0).normal(size=(heads, clusters, width))
    sums = jnp.asarray(drawn / np.linalg.norm(drawn, axis=-1, keepdims=True), jnp.float32)
    counts = jnp.ones((heads, clusters), jnp.float32)
    return ClusterStatistics(counts, sums, jnp.zeros_like(counts), jnp.zeros_like(sums))


def nearest_clusters(
    queries: Float[Array, "B T H K"], statistics: ClusterStatistics
) -> Int[Array, "B T H"]:
    """Returns the cluster with the largest cosine to each token's query."""
    directions = l2_normalize(statistics.sums).astype(queries.dtype)
    cosines = jnp.einsum(
        "bthk,hck->bthc", jax.lax.stop_gradient(queries), directions,
        preferred_element_type=jnp.float32,
    )  # fmt: skip
    return jnp.argmax(cosines, axis=-1).astype(jnp.int32)


def add_tokens(
    statistics: ClusterStatistics, queries: Float[Array, "B T H K"], clusters: Int[Array, "B T H"]
) -> ClusterStatistics:
    """Adds these tokens to the new counts and sums."""
    queries = jax.lax.stop_gradient(queries).astype(jnp.float32)
    ones = jax.nn.one_hot(clusters, statistics.counts.shape[-1], dtype=jnp.float32)
    sums = jnp.einsum("bthc,bthk->hck", ones, queries)
    return statistics._replace(
        new_counts=statistics.new_counts + jnp.sum(ones, axis=(0, 1)),
        new_sums=statistics.new_sums + sums,
    )


def update_averages(statistics: ClusterStatistics, decay: float) -> ClusterStatistics:
    """Updates the averages with the new tokens, once a step, whatever number of parts it was read
    in.

    A cluster without tokens keeps its averages; they would otherwise decay to zero.
    """
    old, new = statistics[:2], statistics[2:]
    full = statistics.new_counts > 0
    fulls = full, full[..., None]
    after = (
        jnp.where(f, decay * a + (1 - decay) * b, a)
        for f, a, b in zip(fulls, old, new, strict=True)
    )
    return ClusterStatistics(*after, *map(jnp.zeros_like, new))


def commitment(
    queries: Float[Array, "B T H K"], clusters: Int[Array, "B T H"], statistics: ClusterStatistics
) -> Float[Array, ""]:
    """Returns the mean squared distance of queries to their centroids, which are constants."""
    means = jax.lax.stop_gradient(statistics.sums / statistics.counts[..., None])
    own = jnp.einsum("bthc,hck->bthk", jax.nn.one_hot(clusters, means.shape[1]), means)
    return jnp.mean(jnp.sum(jnp.square(queries.astype(jnp.float32) - own), axis=-1))
