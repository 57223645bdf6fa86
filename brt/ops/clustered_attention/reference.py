"""Clustered attention with all weights [B, H, T, X] at once; also hash codes and k-means."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.ops.clustered_attention.config import ClusteredConfig, ClusterInputs, Codes


def attend(
    inputs: ClusterInputs, config: ClusteredConfig, *, dropout: None = None
) -> Float[Array, "B H T E"]:
    """Implements `api.attend_by_label`."""
    queries, keys, values, valid, labels, bias = inputs
    together, real = _same_cluster(labels, config)
    own_centroid = _cluster_mean(queries, together)
    mask = valid[:, None, None]
    pairs = _pair_bias(bias, queries, keys)
    logits = _logits(own_centroid, keys) + _cluster_mean(pairs, together)
    weights = _softmax(logits, mask)
    if config.kind == "improved_clustered":
        exact = _logits(queries, keys) + pairs
        best = mask & (_rank(jnp.where(mask, logits, -jnp.inf)) < config.top_k)
        mass = jnp.sum(jnp.where(best, weights, 0), axis=-1, keepdims=True)
        mass = jax.lax.stop_gradient(mass) if config.mass_stop_gradient else mass
        weights = jnp.where(best, mass * _softmax(exact, best), weights)
    return jnp.where(real, weights @ values, 0)


def hash_codes(
    x: Float[Array, "*B K"], normals: Float[Array, "P K"], offsets: Float[Array, " P"]
) -> Float[Array, "*B P"]:
    """Implements `hashing.hash_codes`."""
    bits = [x @ n > b for n, b in zip(normals, offsets, strict=True)]
    return jnp.where(jnp.stack(bits, axis=-1), 1.0, -1.0)


def kmeans(
    inputs: Codes, *, iterations: int
) -> tuple[Int[Array, "B H T"], Float[Array, "B H C P"]]:
    """Implements `clustering.kmeans`."""
    per_head = partial(_kmeans, iterations=iterations)
    return jax.vmap(jax.vmap(per_head, (0, None, 0, None)))(*inputs)


def _kmeans(
    codes: Float[Array, "T P"],
    valid: Bool[Array, " T"],
    centroids: Float[Array, "C P"],
    active: Bool[Array, " C"],
    *,
    iterations: int,
) -> tuple[Int[Array, " T"], Float[Array, "C P"]]:
    clusters = len(centroids)
    for i in range(iterations):
        distance = jnp.sum(codes[:, None] != centroids[None], axis=-1)
        labels = jnp.argmin(jnp.where(active[None], distance, jnp.iinfo(jnp.int32).max), axis=-1)
        labels = jnp.where(valid, labels, clusters)
        if i == iterations - 1:
            break
        for c in range(clusters):
            ones = jnp.sum((codes > 0) & (labels == c)[:, None], axis=0)
            members = jnp.sum(labels == c)
            majority = jnp.where(2 * ones > members, 1.0, -1.0)
            centroids = centroids.at[c].set(jnp.where(members > 0, majority, centroids[c]))
    return labels, centroids


def _same_cluster(
    labels: Int[Array, "B H T"], config: ClusteredConfig
) -> tuple[Bool[Array, "B H T T"], Bool[Array, "B H T 1"]]:
    """Returns two masks: pairs of queries that share a cluster, and queries other than padding."""
    real = labels < config.cluster_count(labels)
    same = labels[..., :, None] == labels[..., None, :]
    return same & real[..., None, :], real[..., None]


def _cluster_mean(x: Float[Array, "B H T K"], together: Bool[Array, "B H T T"]) -> Array:
    count = jnp.maximum(jnp.sum(together, axis=-1, keepdims=True), 1)
    return together.astype(x.dtype) @ x / count.astype(x.dtype)


def _logits(queries: Float[Array, "B H T K"], keys: Float[Array, "B H X K"]) -> Array:
    return queries @ keys.swapaxes(-2, -1)


def _pair_bias(bias: Float[Array, "H O"] | None, queries: Array, keys: Array) -> Array:
    """Returns the bias [B, H, T, X] of each pair of a query and a key; 0 if `bias` is None."""
    tokens, count = queries.shape[2], keys.shape[2]
    if bias is None:
        return jnp.zeros((*queries.shape[:3], count), queries.dtype)
    places = jnp.arange(count)[None] - jnp.arange(tokens)[:, None] + tokens - 1
    pairs = jnp.take(bias, places, axis=1)
    return jnp.broadcast_to(pairs, (len(queries), *pairs.shape))


def _rank(x: Float[Array, "B H T X"]) -> Int[Array, "B H T X"]:
    """Returns the rank of each number, 0 for the largest; equal numbers rank in their order."""
    x = jax.lax.stop_gradient(x)
    return jnp.argsort(jnp.argsort(-x, axis=-1, stable=True), axis=-1)


def _softmax(logits: Float[Array, "B H T X"], mask: Bool[Array, "B #H #T X"]) -> Array:
    weights = jax.nn.softmax(jnp.where(mask, logits, jnp.finfo(logits.dtype).min), axis=-1)
    return jnp.where(mask, weights, 0)
