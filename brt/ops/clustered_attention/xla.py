"""Clustered attention in plain XLA, with weights [C, X] and [T, R] for each head.

R is the number of best keys of a cluster; see `api` for the other axes. Equations and
sections are those of Vyas et al. 2020.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.ops.clustered_attention.config import ClusteredConfig, ClusterInputs
from brt.ops.clustered_attention.members import (
    build_tiles,
    cluster_sums,
    from_tiles,
    gather_by_label,
    gather_by_tile,
    member_counts,
    tile_size,
    to_tiles,
)
from brt.ops.clustered_attention.relative import mean_bias, pair_bias
from brt.ops.dropout import Dropout
from brt.ops.partial_attention import AttentionPart, attend_to_part
from brt.ops.products import matmul_nt
from brt.ops.softmax import MASKED, softmax_and_lse
from brt.ops.top_k import largest, take


class BestKeys(NamedTuple):
    """The best keys of each cluster: the keys with the largest logits for its centroid."""

    indices: Int[Array, "B H C R"]
    # False for entries of `indices` without a key, if there are fewer than R valid keys
    there: Bool[Array, "B H C R"]
    # True for the best keys; the value for invalid keys has no meaning
    mask: Bool[Array, "B H C X"]


# A function that returns the attention of the centroids to the keys that they see. Its arguments
# are the centroids [B, H, C, K], the keys, the values, a mask that is True where a centroid sees a
# key, the logits (for functions that do not compute them from the centroids), and dropout.
CentroidAttention = Callable[
    [Array, Array, Array, Bool[Array, "B #H #C X"], Float[Array, "B H C X"], Dropout | None],
    AttentionPart,
]


def attend_from_centroids(
    centroids: Array,
    keys: Array,
    values: Array,
    seen: Bool[Array, "B #H #C X"],
    logits: Float[Array, "B H C X"],
    dropout: Dropout | None,
) -> AttentionPart:
    return attend_to_part(jnp.where(seen, logits, MASKED), values, dropout)


def attend(
    inputs: ClusterInputs,
    config: ClusteredConfig,
    *,
    dropout: Dropout | None,
    attend: CentroidAttention = attend_from_centroids,
) -> Float[Array, "B H T E"]:
    """Implements `api.attend_by_label`; `attend` computes the attention of the centroids."""
    kind = _clustered if config.kind == "clustered" else _improved_clustered
    return kind(inputs, config, dropout, attend)


def _clustered(
    inputs: ClusterInputs,
    config: ClusteredConfig,
    dropout: Dropout | None,
    attend: CentroidAttention,
) -> Float[Array, "B H T E"]:
    """Returns clustered attention (equations 4-6)."""
    queries, keys, values, valid, labels, bias = inputs
    clusters = config.cluster_count(labels)
    centroids = _centroids(queries, labels, clusters)
    logits = matmul_nt(centroids, keys)
    if bias is not None:
        logits += mean_bias(bias, labels, clusters)
    part = attend(centroids, keys, values, valid[:, None, None], logits, dropout)
    return gather_by_label(part.output.astype(values.dtype), labels)


def _improved_clustered(
    inputs: ClusterInputs,
    config: ClusteredConfig,
    dropout: Dropout | None,
    attend: CentroidAttention,
) -> Float[Array, "B H T E"]:
    """Returns improved clustered attention (section 3.3).

    `attend` computes the attention of the centroids to the other keys. `dropout.part(0)` is for the
    weights that queries give the best keys, and `dropout.part(1)` for the weights of the centroids.
    """
    queries, keys, values, valid, labels, bias = inputs
    tokens, clusters = labels.shape[-1], config.cluster_count(labels)
    size = min(tile_size(tokens, clusters), tokens)
    tiles = build_tiles(labels, clusters=clusters, size=size)
    centroids = _centroids(queries, labels, clusters)
    logits, mean = matmul_nt(centroids, keys), None
    if bias is not None:
        mean = mean_bias(bias, labels, clusters)
        logits += mean
    mask = valid[:, None, None]
    values_of_best, indices, chosen = largest(logits, mask, min(config.top_k, keys.shape[2]))
    best = BestKeys(indices, values_of_best > -jnp.inf, chosen)
    best_keys, best_values = (take(x, best.indices) for x in (keys, values))
    best_dropout, rest_dropout = (dropout.part(0), dropout.part(1)) if dropout else (None, None)

    exact = matmul_nt(to_tiles(queries, tiles), gather_by_tile(best_keys, tiles))
    if bias is not None:
        places = tiles.queries.reshape(exact.shape[:-1])
        exact += pair_bias(bias, places, gather_by_tile(best.indices, tiles), tokens)
    exact = jnp.where(gather_by_tile(best.there, tiles)[..., None, :], exact, MASKED)
    own = attend_to_part(exact, gather_by_tile(best_values, tiles), best_dropout)
    rest = attend(centroids, keys, values, mask & ~best.mask, logits, rest_dropout)
    rest = AttentionPart(*(gather_by_tile(x, tiles)[:, :, :, None] for x in rest))
    lse = gather_by_tile(_best_keys_lse(centroids, best_keys, best, mean), tiles)[..., None]
    mass = jax.nn.sigmoid(lse - rest.lse)[..., None]
    share = jax.lax.stop_gradient(mass) if config.mass_stop_gradient else mass
    y = share * own.output + (1 - mass) * rest.output
    return from_tiles(y.astype(values.dtype), tiles)


def _best_keys_lse(
    centroids: Float[Array, "B H C K"],
    best_keys: Float[Array, "B H C R K"],
    best: BestKeys,
    mean_bias: Float[Array, "B H C X"] | None,
) -> Float[Array, "B H C"]:
    """Returns the log-sum-exp of each centroid's logits of the best keys of its cluster."""
    # In the paper, all members of a cluster give the best keys the same total weight, so the weight
    # is computed from the centroid.
    logits = matmul_nt(centroids[..., None, :], best_keys)[..., 0, :]
    if mean_bias is not None:
        logits += jnp.take_along_axis(mean_bias, best.indices, axis=-1)
    return softmax_and_lse(jnp.where(best.there, logits, MASKED))[1]


def _centroids(
    queries: Float[Array, "B H T K"], labels: Int[Array, "B H T"], clusters: int
) -> Float[Array, "B H C K"]:
    """Returns the means of the clusters' members (equation 3); empty clusters have zeros."""
    sums = cluster_sums(queries.astype(jnp.float32), labels, clusters)
    members = jnp.maximum(member_counts(labels, clusters), 1).astype(jnp.float32)
    return (sums / members[..., None]).astype(queries.dtype)
