"""The centroids of clusters of tokens: means of the tokens' queries, learned without gradients.
Queries are normalized to length 1.

The number of a cluster's tokens and the sum of their queries are moving averages over train steps
(Routing Transformers, section 4.1, spherical k-means). Sums start as unit vectors and counts start
as 1, so that no sum is divided by a count near 0 at the start. Tokens are assigned to clusters by
the directions of the centroids alone, so the length of a centroid does not matter.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from brt.ops.normalization import l2_normalize


class ClusterStatistics(NamedTuple):
    """Float32 statistics of C clusters of each head; *L is an axis of layers, if any. The centroids
    are `sums` / `counts`.
    """

    # Moving averages of the number of a cluster's tokens and of the sum of their queries.
    counts: Float[Array, "*L H C"]
    sums: Float[Array, "*L H C K"]
    # The same since the last `update_averages`, which alone changes the averages.
    new_counts: Float[Array, "*L H C"]
    new_sums: Float[Array, "*L H C K"]


def new_statistics(heads: int, clusters: int, width: int) -> ClusterStatistics:
    """Returns initial statistics, whose pseudo-random centroids are the same in every call."""
    drawn = np.random.default_rng(0).normal(size=(heads, clusters, width))
    sums = jnp.asarray(drawn / np.linalg.norm(drawn, axis=-1, keepdims=True), jnp.float32)
    counts = jnp.ones((heads, clusters), jnp.float32)
    return ClusterStatistics(counts, sums, jnp.zeros_like(counts), jnp.zeros_like(sums))


def nearest_clusters(
    queries: Float[Array, "B T H K"], statistics: ClusterStatistics
) -> Int[Array, "B T H"]:
    """Returns the index of the cluster whose centroid has the largest cosine to each query."""
    directions = l2_normalize(statistics.sums).astype(queries.dtype)
    cosines = jnp.einsum(
        "bthk,hck->bthc", jax.lax.stop_gradient(queries), directions,
        preferred_element_type=jnp.float32,
    )  # fmt: skip
    return jnp.argmax(cosines, axis=-1).astype(jnp.int32)


def add_tokens(
    statistics: ClusterStatistics, queries: Float[Array, "B T H K"], clusters: Int[Array, "B T H"]
) -> ClusterStatistics:
    """Adds tokens to `new_counts` and `new_sums`. The centroids do not change."""
    queries = jax.lax.stop_gradient(queries).astype(jnp.float32)
    ones = jax.nn.one_hot(clusters, statistics.counts.shape[-1], dtype=jnp.float32)
    sums = jnp.einsum("bthc,bthk->hck", ones, queries)
    return statistics._replace(
        new_counts=statistics.new_counts + jnp.sum(ones, axis=(0, 1)),
        new_sums=statistics.new_sums + sums,
    )


def update_averages(statistics: ClusterStatistics, decay: float) -> ClusterStatistics:
    """Moves the averages towards `new_counts` and `new_sums`, which are then set to zero.

    A cluster without new tokens keeps its averages, which would otherwise decay to zero. A train
    step calls this function once, even if the step reads its batch in several parts. `decay` is the
    weight of the old averages.
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
    """Returns the mean squared distance between queries and the centroids of their clusters: the
    loss that keeps queries close to centroids, which get no gradient.
    """
    means = jax.lax.stop_gradient(statistics.sums / statistics.counts[..., None])
    own = jnp.einsum("bthc,hck->bthk", jax.nn.one_hot(clusters, means.shape[1]), means)
    return jnp.mean(jnp.sum(jnp.square(queries.astype(jnp.float32) - own), axis=-1))
