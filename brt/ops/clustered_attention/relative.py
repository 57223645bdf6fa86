"""A relative position bias, such as T5's, for clustered attention.

The logits of a cluster are the means of its members' logits, including their biases. The mean blurs
the distances. In improved clustered attention, however, the logits of the best keys have the exact
bias of every query. The argument `row` has the bias of each distance. In shapes, R is the number of
best keys, N the number of tiles, and M the number of slots of a tile (`members`). `api` describes
the other axes.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brt.ops.clustered_attention.members import member_counts


def mean_bias(
    row: Float[Array, "H O"], labels: Int[Array, "B H T"], clusters: int
) -> Float[Array, "B H C X"]:
    """Returns the bias between each cluster and key, a mean over the queries of the cluster."""
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
    """Returns the bias between each query and each key of a tile, from their positions."""
    places = keys[..., None, :] - queries[..., None] + tokens - 1
    per_head = jax.vmap(lambda row, places: row.at[places].get(mode="clip"), in_axes=(0, 1))
    return jnp.moveaxis(per_head(row, places), 0, 1)
