"""A relative position bias, such as T5's, for clustered attention.

The logits of a cluster are the means of its members' logits, including their biases: the product of
the centroid and a key, plus the mean of the members' biases for this key. The mean blurs the
distances, because the members of a cluster are at different positions. The best keys of improved
clustered attention get the exact bias of every query.

In shapes, B is the number of rows of the batch, H of heads, T of queries, X of keys, C of clusters,
R of best keys of a cluster, and N of tiles of M queries of one cluster.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brt.ops.clustered_attention.members import member_counts


def mean_bias(
    row: Float[Array, "H O"], labels: Int[Array, "B H T"], clusters: int
) -> Float[Array, "B H C X"]:
    """Returns the bias between each cluster and each key: the mean of the biases between the
    cluster's queries and the key.

    A Fourier transform computes all means at once.

    Args:
      row: the bias of each distance (key minus query) from 1 - T to X - 1; O = T + X - 1.
      labels: the cluster of each query.
      clusters: the number of clusters.
    """
    # The product of two Fourier transforms is the transform of a circular convolution. The entries
    # of the convolution that wrap around are sliced off below.
    tokens, size = labels.shape[-1], row.shape[-1] + 1
    members = jax.nn.one_hot(labels, clusters, dtype=row.dtype, axis=-2)
    spectrum = jnp.fft.rfft(members, size) * jnp.fft.rfft(row, size)[None, :, None]
    sums = jnp.fft.irfft(spectrum, size)[..., tokens - 1 : -1]
    return sums / jnp.maximum(member_counts(labels, clusters), 1)[..., None]


def pair_bias(
    row: Float[Array, "H O"],
    queries: Int[Array, "B H N M"],
    keys: Int[Array, "B H N R"],
    tokens: int,
) -> Float[Array, "B H N M R"]:
    """Returns the bias between every query of a tile and each of the tile's keys.

    Args:
      row: the bias of each distance (key minus query) from 1 - T to X - 1; O = T + X - 1.
      queries: the positions of each tile's queries in the sequence.
      keys: the positions of each tile's keys, which are the best keys of the tile's cluster.
      tokens: T, the number of queries.
    """
    places = keys[..., None, :] - queries[..., None] + tokens - 1
    per_head = jax.vmap(lambda row, places: row.at[places].get(mode="clip"), in_axes=(0, 1))
    return jnp.moveaxis(per_head(row, places), 0, 1)
