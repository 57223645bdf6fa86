"""Clustered attention in plain XLA; per head there exist [C, X] and [T, R] weights at once."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.config import Attention
from brt.ops.clustered_attention.members import (
    Tiles,
    cluster_sums,
    from_tiles,
    member_counts,
    of_members,
    of_tile,
    tile_size,
    tiles_of,
    to_tiles,
)
from brt.ops.dropout import Dropout
from brt.ops.masked_attention import masked_softmax
from brt.ops.memory_attention.retrieval import take
from brt.ops.top_k import top_k


class Best(NamedTuple):
    """The keys that centroids attend to most.

    Attributes:
      indices: int32 [B, H, C, R].
      there: bool [B, H, C, R], False where there were too few keys.
      mask: bool [B, H, C, X], True on the same keys; of no meaning on unseen ones.
    """

    indices: Int[Array, "B H C R"]
    there: Bool[Array, "B H C R"]
    mask: Bool[Array, "B H C X"]


def clustered(
    queries: Float[Array, "B H T K"],
    keys: Float[Array, "B H X K"],
    values: Float[Array, "B H X E"],
    valid: Bool[Array, "B X"],
    labels: Int[Array, "B H T"],
    config: Attention,
    dropout: Dropout | None,
) -> Float[Array, "B H T E"]:
    """Every query gets what its centroid gets (equations 4 to 6)."""
    logits = _product("bhck,bhxk->bhcx", _centroids(queries, labels, config), keys)
    weights = _dropped(masked_softmax(logits, valid[:, None, None]), dropout, values)
    return of_members(_product("bhcx,bhxe->bhce", weights, values).astype(values.dtype), labels)


def improved_clustered(
    queries: Float[Array, "B H T K"],
    keys: Float[Array, "B H X K"],
    values: Float[Array, "B H X E"],
    valid: Bool[Array, "B X"],
    labels: Int[Array, "B H T"],
    config: Attention,
    dropout: Dropout | None,
) -> Float[Array, "B H T E"]:
    """Exact logits for a cluster's best keys, the centroid's for the others (section 3.3)."""
    tokens, clusters = labels.shape[-1], _clusters(labels, config)
    size = min(config.tile or tile_size(tokens, clusters), tokens)
    tiles = tiles_of(labels, clusters=clusters, size=size)
    centroids = _centroids(queries, labels, config)
    logits = _product("bhck,bhxk->bhcx", centroids, keys)
    seen = valid[:, None, None]
    best = _best(logits, seen, config.top_k)
    best_keys, best_values = (of_tile(take(x, best.indices), tiles) for x in (keys, values))
    exact = _product("bhnmk,bhnrk->bhnmr", to_tiles(queries, tiles), best_keys)
    there = of_tile(best.there, tiles)[..., None, :]
    if config.mass_rule == "paper":
        constant = config.mass_stop_gradient
        parts = _by_mass(exact, there, logits, seen, best, tiles, constant=constant)
    else:
        spread = _spread(queries, labels, centroids)
        expected = logits + spread[..., None] * _half_squares(keys)[:, :, None]
        parts = _by_total(exact, there, expected, seen, best, tiles)
    of_best, of_rest = (dropout.part(0), dropout.part(1)) if dropout else (None, None)
    rest = _product("bhcx,bhxe->bhce", _dropped(parts.rest, of_rest, values), values)
    y = _product("bhnmr,bhnre->bhnme", _dropped(parts.best, of_best, values), best_values)
    y += parts.share * of_tile(rest, tiles)[..., None, :]
    return from_tiles(y.astype(values.dtype), tiles)


class Parts(NamedTuple):
    """Attention weights in two parts; float32.

    Attributes:
      best: [B, H, N, M, R], of every query for its cluster's best keys.
      rest: [B, H, C, X], of every cluster for the others; zeros for the best.
      share: [B, H, N, M, 1] or a one, what the rest counts for a query.
    """

    best: Float[Array, "B H N M R"]
    rest: Float[Array, "B H C X"]
    share: Float[Array, "B H N M 1"] | Float[Array, "1 1 1 1 1"]


def _by_mass(
    exact: Float[Array, "B H N M R"],
    there: Bool[Array, "B H N 1 R"],
    logits: Float[Array, "B H C X"],
    seen: Bool[Array, "B 1 1 X"],
    best: Best,
    tiles: Tiles,
    *,
    constant: bool,
) -> Parts:
    """The best keys share what the centroid gives them together (equations 9 and 10)."""
    rest = jnp.where(best.mask, 0, masked_softmax(logits, seen))
    mass = 1 - jnp.sum(rest, axis=-1)
    mass = jax.lax.stop_gradient(mass) if constant else mass
    weights = masked_softmax(exact, there) * of_tile(mass, tiles)[..., None, None]
    return Parts(weights, rest, jnp.ones((1, 1, 1, 1, 1)))


def _by_total(
    exact: Float[Array, "B H N M R"],
    there: Bool[Array, "B H N 1 R"],
    expected: Float[Array, "B H C X"],
    seen: Bool[Array, "B 1 1 X"],
    best: Best,
    tiles: Tiles,
) -> Parts:
    """One softmax over the best keys and all others together, as one key with their total.

    Args:
      expected: logarithms of the mean exp(logit) of a cluster's queries.
    """
    others = seen & ~best.mask
    hidden = jnp.where(others, expected, jnp.finfo(jnp.float32).min)
    total = of_tile(jax.nn.logsumexp(hidden, axis=-1), tiles)[..., None, None]
    some = of_tile(jnp.any(others, axis=-1), tiles)[..., None, None]
    total = jnp.broadcast_to(total, (*exact.shape[:-1], 1))
    seen = jnp.concatenate([there, some], axis=-1)
    weights = masked_softmax(jnp.concatenate([exact, total], axis=-1), seen)
    return Parts(weights[..., :-1], masked_softmax(expected, others), weights[..., -1:])


def _best(logits: Float[Array, "B H C X"], seen: Bool[Array, "B 1 1 X"], count: int) -> Best:
    ranked = jnp.where(seen, jax.lax.stop_gradient(logits), -jnp.inf)
    values, indices = top_k(ranked, min(count, logits.shape[-1]))
    last, place = values[..., -1:], jnp.arange(logits.shape[-1])[None, None, None]
    # Of equal keys the first are best, so the last of the best has the highest index.
    mask = (ranked > last) | ((ranked == last) & (place <= indices[..., -1:]))
    return Best(indices, values > -jnp.inf, mask)


def _centroids(
    queries: Float[Array, "B H T K"], labels: Int[Array, "B H T"], config: Attention
) -> Float[Array, "B H C K"]:
    """Means of the members (equation 3), in the queries' dtype; zeros of an empty cluster."""
    clusters = _clusters(labels, config)
    sums = cluster_sums(queries.astype(jnp.float32), labels, clusters)
    return (sums / _divisors(labels, clusters)[..., None]).astype(queries.dtype)


def _spread(
    queries: Float[Array, "B H T K"],
    labels: Int[Array, "B H T"],
    centroids: Float[Array, "B H C K"],
) -> Float[Array, "B H C"]:
    """The variance of a cluster's members, averaged over the numbers of a query."""
    clusters = centroids.shape[2]
    away = queries.astype(jnp.float32) - of_members(centroids.astype(jnp.float32), labels)
    squares = jnp.mean(away**2, axis=-1, keepdims=True)
    return cluster_sums(squares, labels, clusters)[..., 0] / _divisors(labels, clusters)


def _half_squares(keys: Float[Array, "B H X K"]) -> Float[Array, "B H X"]:
    return jnp.sum(keys.astype(jnp.float32) ** 2, axis=-1) / 2


def _clusters(labels: Int[Array, "B H T"], config: Attention) -> int:
    return min(config.clusters, labels.shape[-1])


def _divisors(labels: Int[Array, "B H T"], clusters: int) -> Float[Array, "B H C"]:
    return jnp.maximum(member_counts(labels, clusters), 1)


def _product(spec: str, a: Array, b: Array) -> Array:
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)


def _dropped(weights: Array, dropout: Dropout | None, values: Array) -> Array:
    weights = weights.astype(values.dtype)
    return weights if dropout is None else dropout(weights)
