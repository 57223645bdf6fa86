"""A bias of distances, as T5's: a cluster's logits are the means of its members' with it, too.

So a centroid's product with a key comes with the mean of its members' biases. It tells how far
a key is no better than the members of a cluster lie together; the best keys of improved
clustered attention get every query's own bias.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brt.ops.clustered_attention.members import member_counts


def mean_bias(
    row: Float[Array, "H O"], labels: Int[Array, "B H T"], clusters: int
) -> Float[Array, "B H C X"]:
    """The mean bias of a cluster's queries and each key, as a product of spectra.

    Args:
      row: of each distance (key minus query) from 1 - T to X - 1: O = T + X - 1.
    """
    tokens, size = labels.shape[-1], row.shape[-1] + 1  # what wraps around is cut off
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
    """The bias of every query and each of its tile's keys, which are given by their places."""
    places = keys[..., None, :] - queries[..., None] + tokens - 1
    of_heads = jax.vmap(lambda row, places: row.at[places].get(mode="clip"), in_axes=(0, 1))
    return jnp.moveaxis(of_heads(row, places), 0, 1)
