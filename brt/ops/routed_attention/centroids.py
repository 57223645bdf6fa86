"""What tokens are shared out to clusters by: means of their queries, learned without gradients.

Counts and sums are moving averages over steps (Routing Transformers, section 4.1, spherical
k-means). Sums count from unit vectors and counts from 1, so that no cluster is divided by next to
nothing at first; only directions decide, so that no cluster draws tokens by its length.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from brt.ops.normalization import l2_normalize


class Statistics(NamedTuple):
    """Of C clusters of each head, float32.

    Attributes:
      counts: [*L, H, C], tokens of a step, averaged.
      sums: [*L, H, C, K], of their queries; `sums / counts` are the centroids.
      new_counts, new_sums: of the tokens since the last `settled`, which alone moves centroids.
    """

    counts: Float[Array, "*L H C"]
    sums: Float[Array, "*L H C K"]
    new_counts: Float[Array, "*L H C"]
    new_sums: Float[Array, "*L H C K"]


def new_statistics(heads: int, clusters: int, width: int) -> Statistics:
    """Of no tokens: directions at random, always the same."""
    drawn = np.random.default_rng(0).normal(size=(heads, clusters, width))
    sums = jnp.asarray(drawn / np.linalg.norm(drawn, axis=-1, keepdims=True), jnp.float32)
    counts = jnp.ones((heads, clusters), jnp.float32)
    return Statistics(counts, sums, jnp.zeros_like(counts), jnp.zeros_like(sums))


def nearest(queries: Float[Array, "B T H K"], statistics: Statistics) -> Int[Array, "B T H"]:
    """The cluster of every token: that of the largest cosine, by nothing but its query."""
    directions = l2_normalize(statistics.sums).astype(queries.dtype)
    cosines = jnp.einsum(
        "bthk,hck->bthc", jax.lax.stop_gradient(queries), directions,
        preferred_element_type=jnp.float32,
    )  # fmt: skip
    return jnp.argmax(cosines, axis=-1).astype(jnp.int32)


def counted(
    statistics: Statistics, queries: Float[Array, "B T H K"], clusters: Int[Array, "B T H"]
) -> Statistics:
    """With these tokens among the new ones."""
    queries = jax.lax.stop_gradient(queries).astype(jnp.float32)
    ones = jax.nn.one_hot(clusters, statistics.counts.shape[-1], dtype=jnp.float32)
    sums = jnp.einsum("bthc,bthk->hck", ones, queries)
    return statistics._replace(
        new_counts=statistics.new_counts + jnp.sum(ones, axis=(0, 1)),
        new_sums=statistics.new_sums + sums,
    )


def settled(statistics: Statistics, decay: float) -> Statistics:
    """The averages with the new tokens in them, once a step: however many parts it was read in.

    A cluster without tokens stays as it is: fading, its numbers would one day be none.
    """
    old, new = statistics[:2], statistics[2:]
    full = statistics.new_counts > 0
    fulls = full, full[..., None]
    after = (
        jnp.where(f, decay * a + (1 - decay) * b, a)
        for f, a, b in zip(fulls, old, new, strict=True)
    )
    return Statistics(*after, *map(jnp.zeros_like, new))


def commitment(
    queries: Float[Array, "B T H K"], clusters: Int[Array, "B T H"], statistics: Statistics
) -> Float[Array, ""]:
    """Mean square distance of queries to their centroids, which are constants."""
    means = jax.lax.stop_gradient(statistics.sums / statistics.counts[..., None])
    own = jnp.einsum("bthc,hck->bthk", jax.nn.one_hot(clusters, means.shape[1]), means)
    return jnp.mean(jnp.sum(jnp.square(queries.astype(jnp.float32) - own), axis=-1))
