"""Sums over a cluster's queries, copies of its vector for the queries, and tiles of queries.

The queries of a head are sorted by cluster and laid out in N tiles of M slots. Each tile belongs to
one cluster, and only the last tile of a cluster has empty slots. An array that the queries of a
cluster share is therefore read once per tile, and products with it are dense. The functions come in
pairs. Each function of a pair is the transpose of the other and therefore its backward pass, so no
backward pass scatters vectors to T queries. The label of a query is the index of its cluster;
padding has the label C, the number of clusters.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped


class QueryTiles(NamedTuple):
    """The assignment of the queries of each head to tiles of M slots."""

    queries: Int[Array, "B H NM"]  # the query in each slot; T for an empty slot
    slots: Int[Array, "B H T"]  # the slot of each query; N * M for padding
    clusters: Int[Array, "B H N"]  # the cluster of each tile; any cluster for an empty tile


def tile_size(tokens: int, clusters: int) -> int:
    """Returns the number of slots of a tile, the largest power of 2 up to a cluster's mean size.

    The number is at least 8 and at most 128. Fewer slots are empty than `clusters` tiles have. With
    a mean of 8 or more queries per cluster, less than half of all slots are therefore empty.
    """
    usual = max(tokens // clusters, 1)
    return min(max(1 << (usual.bit_length() - 1), 8), 128)


def build_tiles(labels: Int[Array, "B H T"], *, clusters: int, size: int) -> QueryTiles:
    """Assigns queries to tiles of `size` slots. There are enough tiles for clusters of any sizes.

    A tile has queries of one cluster only. Queries whose label is at least `clusters` get no tile.
    """
    tokens = labels.shape[-1]
    count = min((tokens + clusters * (size - 1)) // size, tokens)
    members = member_counts(labels, clusters)
    tiles, end_rank = -(-members // size), jnp.cumsum(members, axis=-1)
    end = jnp.cumsum(tiles, axis=-1)
    # The rank of a query is its index after all queries of a head are sorted by cluster. The
    # queries of a cluster have consecutive ranks and consecutive slots, so the slot minus the rank
    # is the same number for all of them. This number is `shift`.
    shift = (end - tiles) * size - (end_rank - members)

    order = _sort_by_label(labels)
    cluster = jnp.minimum(labels, clusters - 1)
    slots = _inverse_permutation(order) + jnp.take_along_axis(shift, cluster, axis=-1)
    slots = jnp.where(labels < clusters, slots, count * size)

    places = jnp.arange(count, dtype=jnp.int32)[None, None, :, None]
    tile_clusters = jnp.sum(end[:, :, None] <= places, axis=-1, dtype=jnp.int32)
    tile_clusters = jnp.minimum(tile_clusters, clusters - 1)
    shift, end_rank = (
        jnp.repeat(jnp.take_along_axis(x, tile_clusters, axis=-1), size, axis=-1)
        for x in (shift, end_rank)
    )
    rank = jnp.arange(count * size, dtype=jnp.int32)[None, None] - shift
    queries = jnp.take_along_axis(order, jnp.minimum(rank, tokens - 1), axis=-1)
    return QueryTiles(jnp.where(rank < end_rank, queries, tokens), slots, tile_clusters)


def _sort_by_label(labels: Int[Array, "B H T"]) -> Int[Array, "B H T"]:
    tokens = labels.shape[-1]
    # Label and position are combined to the number label * T + position. Labels are at most T, so
    # the largest such number is T * T + T - 1, which has to fit into 32 bits.
    if (tokens + 1) * tokens > jnp.iinfo(jnp.uint32).max:
        return jnp.argsort(labels, axis=-1, stable=True).astype(jnp.int32)
    places = jnp.arange(tokens, dtype=jnp.uint32)[None, None]
    ranked = jnp.sort(labels.astype(jnp.uint32) * tokens + places, axis=-1)
    return (ranked % tokens).astype(jnp.int32)


def _inverse_permutation(order: Int[Array, "B H T"]) -> Int[Array, "B H T"]:
    places = jnp.arange(order.shape[-1], dtype=order.dtype)

    def invert_order(order: Int[Array, " T"]) -> Int[Array, " T"]:
        return jnp.zeros_like(places).at[order].set(places, unique_indices=True)

    return jax.vmap(jax.vmap(invert_order))(order)


def to_tiles(x: Float[Array, "B H T K"], tiles: QueryTiles) -> Float[Array, "B H N M K"]:
    """Returns, for each slot, the vector x of the slot's query; empty slots get zeros."""
    return _permute_rows(x, tiles.queries, tiles.slots).reshape(
        *tiles.clusters.shape, -1, x.shape[-1]
    )


def from_tiles(x: Float[Array, "B H N M K"], tiles: QueryTiles) -> Float[Array, "B H T K"]:
    """Returns, for each query, the vector that x has in the query's slot; padding gets zeros."""
    flat = x.reshape(*x.shape[:2], -1, x.shape[-1])
    return _permute_rows(flat, tiles.slots, tiles.queries)


def gather_by_tile(x: Shaped[Array, "B H C *R"], tiles: QueryTiles) -> Shaped[Array, "B H N *R"]:
    """Returns, for each tile, the row of x that belongs to the tile's cluster."""

    def gather_rows(x: Array, clusters: Array) -> Array:
        return x.at[clusters].get(mode="promise_in_bounds", indices_are_sorted=True)

    return jax.vmap(jax.vmap(gather_rows))(x, tiles.clusters)


def member_counts(labels: Int[Array, "B H T"], clusters: int) -> Int[Array, "B H C"]:
    return _segment_sums(jnp.ones_like(labels), labels, clusters)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def cluster_sums(
    x: Float[Array, "B H T K"], labels: Int[Array, "B H T"], clusters: int
) -> Float[Array, "B H C K"]:
    """Returns the sum of x over the queries of each cluster, computed in float32 or better."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return _segment_sums(wide, labels, clusters).astype(x.dtype)


def gather_by_label(
    x: Float[Array, "B H C K"], labels: Int[Array, "B H T"]
) -> Float[Array, "B H T K"]:
    """Returns, for each query, the row of x for the query's cluster; padding gets zeros."""
    return _gather_by_label(x, labels, x.shape[2])


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _gather_by_label(x: Array, labels: Array, clusters: int) -> Array:
    return _gather_rows(x, labels)


cluster_sums.defvjp(
    lambda x, labels, clusters: (cluster_sums(x, labels, clusters), labels),
    lambda clusters, labels, gradient: (_gather_by_label(gradient, labels, clusters), None),
)
_gather_by_label.defvjp(
    lambda x, labels, clusters: (_gather_by_label(x, labels, clusters), labels),
    lambda clusters, labels, gradient: (cluster_sums(gradient, labels, clusters), None),
)


def _segment_sums(x: Array, indices: Array, count: int) -> Array:
    def sum_rows(x: Array, indices: Array) -> Array:
        return jnp.zeros((count, *x.shape[1:]), x.dtype).at[indices].add(x, mode="drop")

    return jax.vmap(jax.vmap(sum_rows))(x, indices)


def _gather_rows(x: Array, indices: Array) -> Array:
    """Returns the rows of x of each head; indices beyond the end give zeros."""

    def gather_rows(x: Array, indices: Array) -> Array:
        return x.at[indices].get(mode="fill", fill_value=0)

    return jax.vmap(jax.vmap(gather_rows))(x, indices)


@jax.custom_vjp
def _permute_rows(x: Array, source: Array, destination: Array) -> Array:
    """Returns rows source[i] of x; `destination` is the inverse permutation, for the gradient."""
    return _gather_rows(x, source)


_permute_rows.defvjp(
    lambda x, source, destination: (_permute_rows(x, source, destination), (source, destination)),
    lambda residuals, gradient: (_permute_rows(gradient, residuals[1], residuals[0]), None, None),
)
