"""From queries to their clusters and back: sums, copies, and tiles of sorted queries.

The queries of a head, sorted by label, are laid out in tiles of M slots. A tile belongs to one
cluster; only a cluster's last tile has empty slots. So whatever the queries of a cluster share
is read once a tile, and products with it are dense.

Moves and sums of queries come in pairs, each the transpose of the other, which gives their
backward passes: those of moves without a scatter of T rows.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped


class Tiles(NamedTuple):
    """Where queries lie.

    Attributes:
      queries: the query in each slot, T in an empty one; int32.
      slots: the slot of each query, N * M of padding; int32.
      clusters: the cluster of each tile, any of an empty one; int32.
    """

    queries: Int[Array, "B H NM"]
    slots: Int[Array, "B H T"]
    clusters: Int[Array, "B H N"]


def tile_size(tokens: int, clusters: int) -> int:
    """A cluster's usual size, a power of 2 below it: then half of all slots at most is empty."""
    usual = max(tokens // clusters, 1)
    return min(max(1 << (usual.bit_length() - 1), 8), 128)


def tiles_of(labels: Int[Array, "B H T"], *, clusters: int, size: int) -> Tiles:
    """Tiles for any labels: as many as the most uneven clusters need."""
    tokens = labels.shape[-1]
    count = min((tokens + clusters * (size - 1)) // size, tokens)
    members = member_counts(labels, clusters)
    tiles, end_rank = -(-members // size), jnp.cumsum(members, axis=-1)
    end = jnp.cumsum(tiles, axis=-1)
    shift = (end - tiles) * size - (end_rank - members)  # of a query's slot from its rank

    order = _order(labels)
    own = jnp.minimum(labels, clusters - 1)
    slots = _inverse(order) + jnp.take_along_axis(shift, own, axis=-1)
    slots = jnp.where(labels < clusters, slots, count * size)

    places = jnp.arange(count, dtype=jnp.int32)[None, None, :, None]
    of_tile = jnp.sum(end[:, :, None] <= places, axis=-1, dtype=jnp.int32)
    of_tile = jnp.minimum(of_tile, clusters - 1)
    shift, end_rank = (
        jnp.repeat(jnp.take_along_axis(x, of_tile, axis=-1), size, axis=-1)
        for x in (shift, end_rank)
    )
    rank = jnp.arange(count * size, dtype=jnp.int32)[None, None] - shift
    queries = jnp.take_along_axis(order, jnp.minimum(rank, tokens - 1), axis=-1)
    return Tiles(jnp.where(rank < end_rank, queries, tokens), slots, of_tile)


def _order(labels: Int[Array, "B H T"]) -> Int[Array, "B H T"]:
    """Positions by label, those of a label in turn: sorted as numbers, not as pairs, if they fit.

    XLA's CPU backend sorts pairs in four times the time.
    """
    tokens = labels.shape[-1]
    if (tokens + 1) * tokens > jnp.iinfo(jnp.uint32).max:  # labels are not above T
        return jnp.argsort(labels, axis=-1, stable=True).astype(jnp.int32)
    places = jnp.arange(tokens, dtype=jnp.uint32)[None, None]
    ranked = jnp.sort(labels.astype(jnp.uint32) * tokens + places, axis=-1)
    return (ranked % tokens).astype(jnp.int32)


def _inverse(order: Int[Array, "B H T"]) -> Int[Array, "B H T"]:
    places = jnp.arange(order.shape[-1], dtype=order.dtype)

    def of_head(order: Int[Array, " T"]) -> Int[Array, " T"]:
        return jnp.zeros_like(places).at[order].set(places, unique_indices=True)

    return jax.vmap(jax.vmap(of_head))(order)


def to_tiles(x: Float[Array, "B H T K"], tiles: Tiles) -> Float[Array, "B H N M K"]:
    """Every query in its slot; zeros in empty ones."""
    return _moved(x, tiles.queries, tiles.slots).reshape(*tiles.clusters.shape, -1, x.shape[-1])


def from_tiles(x: Float[Array, "B H N M K"], tiles: Tiles) -> Float[Array, "B H T K"]:
    """What lies in every query's slot; zeros for padding."""
    flat = x.reshape(*x.shape[:2], -1, x.shape[-1])
    return _moved(flat, tiles.slots, tiles.queries)


def of_tile(x: Shaped[Array, "B H C *R"], tiles: Tiles) -> Shaped[Array, "B H N *R"]:
    """What belongs to the cluster of every tile."""

    def of_head(x: Array, clusters: Array) -> Array:
        return x.at[clusters].get(mode="promise_in_bounds", indices_are_sorted=True)

    return jax.vmap(jax.vmap(of_head))(x, tiles.clusters)


def member_counts(labels: Int[Array, "B H T"], clusters: int) -> Int[Array, "B H C"]:
    """How many queries a cluster has; int32."""
    return _sums(jnp.ones_like(labels), labels, clusters)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def cluster_sums(
    x: Float[Array, "B H T K"], labels: Int[Array, "B H T"], clusters: int
) -> Float[Array, "B H C K"]:
    """The sum over a cluster's queries; in float32 at least."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return _sums(wide, labels, clusters).astype(x.dtype)


def of_members(x: Float[Array, "B H C K"], labels: Int[Array, "B H T"]) -> Float[Array, "B H T K"]:
    """What belongs to every query's cluster; zeros for padding."""
    return _of_members(x, labels, x.shape[2])


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _of_members(x: Array, labels: Array, clusters: int) -> Array:
    return _rows(x, labels)


cluster_sums.defvjp(
    lambda x, labels, clusters: (cluster_sums(x, labels, clusters), labels),
    lambda clusters, labels, gradient: (_of_members(gradient, labels, clusters), None),
)
_of_members.defvjp(
    lambda x, labels, clusters: (_of_members(x, labels, clusters), labels),
    lambda clusters, labels, gradient: (cluster_sums(gradient, labels, clusters), None),
)


def _sums(x: Array, indices: Array, count: int) -> Array:
    """Rows of x by head, each added to the one of `count` rows that it belongs to."""

    def of_head(x: Array, indices: Array) -> Array:
        return jnp.zeros((count, *x.shape[1:]), x.dtype).at[indices].add(x, mode="drop")

    return jax.vmap(jax.vmap(of_head))(x, indices)


def _rows(x: Array, indices: Array) -> Array:
    """Rows of x by head; zeros beyond its end."""

    def of_head(x: Array, indices: Array) -> Array:
        return x.at[indices].get(mode="fill", fill_value=0)

    return jax.vmap(jax.vmap(of_head))(x, indices)


@jax.custom_vjp
def _moved(x: Array, source: Array, destination: Array) -> Array:
    """Row i of the result is row source[i] of x, which goes nowhere else."""
    return _rows(x, source)


_moved.defvjp(
    lambda x, source, destination: (_moved(x, source, destination), (source, destination)),
    lambda residuals, gradient: (_moved(gradient, residuals[1], residuals[0]), None, None),
)
