"""Masked attention in plain XLA, which computes N tiles of queries one after the other.

The hand-written backward pass recomputes the attention weights, so that no array with a number for
each query and key is saved. All leading axes are merged to one axis B. In shapes, S is the number
of keys, and Q the number of queries (of a tile, if there is an axis N).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.distributed import rules
from brt.ops.dropout import Dropout
from brt.ops.partial_attention import AttentionPart
from brt.ops.products import einsum
from brt.ops.reductions import sum_leading
from brt.ops.softmax import FLOOR

TILE_LOGITS = 1 << 22  # A tile may always have this many logits.


def attend_part(
    queries: Float[Array, "*B Q H K"],
    keys: Float[Array, "*B S H K"],
    values: Float[Array, "*B S H K"],
    bias: Float[Array, "H Q S"] | None,
    mask: Bool[Array, "*#B #Q S"],
    dropout: Dropout | None = None,
    *,
    tile: int | None = None,
) -> AttentionPart:
    """Implements `api.attend_part`.

    A tile has at most `tile` logits on each device, but at least one query.
    """
    lead, (length, heads, width) = queries.shape[:-3], queries.shape[-3:]
    q, k, v = (x.reshape(-1, *x.shape[-3:]).swapaxes(1, 2) for x in (queries, keys, values))
    mask = jnp.broadcast_to(mask, (*lead, *mask.shape[-2:])).reshape(-1, *mask.shape[-2:])
    shared = rules.shard_count("lanes", lead[0]) * rules.shard_count("heads", heads) if lead else 1
    of_query = max(q.shape[0] * heads * k.shape[2] // shared, 1)
    # Each tile reads and writes the sums of the gradients of all keys and values, which takes long
    # if there are many small tiles. By default, a tile therefore has at least as many logits as the
    # keys have elements.
    limit = max(TILE_LOGITS // of_query, width) if tile is None else tile // of_query
    size = max(min(length, limit), 1)
    count = -(-length // size)
    # All tiles have the same number of queries, chosen so that as few queries as possible are
    # padding.
    size = -(-length // count)
    tiles = QueryTiles(
        _split_tiles(q, 2, count, size),
        None if bias is None else _split_tiles(bias, 1, count, size),
        _split_tiles(mask, 1, count, size) if mask.shape[1] > 1 else None,
    )
    shared_mask = None if tiles.mask is not None else mask
    y, lse = (
        jnp.moveaxis(x, 0, 2).reshape(*x.shape[1:3], -1, x.shape[-1])[:, :, :length].swapaxes(1, 2)
        for x in _attend(tiles, k, v, shared_mask, dropout)
    )
    return AttentionPart(y.reshape(queries.shape), lse.reshape(queries.shape[:-1]))


class QueryTiles(NamedTuple):
    """The queries of an attention with their biases and masks, split into N tiles."""

    queries: Float[Array, "N B H Q K"]
    bias: Float[Array, "N H Q S"] | None
    mask: Bool[Array, "N B Q S"] | None  # None for a mask that all queries share


def _split_tiles(x: Array, axis: int, count: int, size: int) -> Array:
    missing = count * size - x.shape[axis]
    x = jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)]) if missing else x
    return jnp.moveaxis(x.reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :]), axis, 0)


@jax.custom_vjp
def _attend(
    tiles: QueryTiles, k: Array, v: Array, mask: Array | None, dropout: Dropout | None
) -> tuple[Array, Array]:
    """Returns the output [N, B, H, Q, K] and the log-sum-exp [N, B, H, Q, 1] of each tile."""
    return _forward(tiles, k, v, mask, dropout)[0]


def _logits(tile: QueryTiles, k: Array, mask: Array | None) -> Array:
    logits = einsum("bhqk,bhsk->bhqs", tile.queries, k)
    if tile.bias is not None:
        logits += tile.bias[None]
    mask = tile.mask if mask is None else mask
    return jnp.where(jnp.expand_dims(mask, 1), logits, -jnp.inf)


def _factors(
    dropout: Dropout | None, index: Array, like: Float[Array, "B H Q S"]
) -> Float[Array, "B H Q S"] | None:
    if dropout is None:
        return None
    lanes, heads, length, keys = like.shape

    def query_factors(place: Int[Array, ""]) -> Float[Array, "B H S"]:
        return dropout.part(place).factors((lanes, heads, keys), like.dtype)

    # Every query draws its factors by its position in the sequence, not in the tile. The result
    # must not depend on the number of devices, but the number of queries of a tile does.
    return jnp.moveaxis(jax.vmap(query_factors)(index * length + jnp.arange(length)), 0, 2)


def _forward(
    tiles: QueryTiles, k: Array, v: Array, mask: Array | None, dropout: Dropout | None
) -> tuple[tuple[Array, Array], tuple]:
    lowest = jnp.finfo(jnp.float32).min

    def attend_tile(xs: tuple[QueryTiles, Array]) -> tuple[Array, Array]:
        logits = _logits(xs[0], k, mask)
        top = jnp.maximum(jnp.max(logits, axis=-1, keepdims=True), lowest)
        weights = jnp.exp(logits - top)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        factors = _factors(dropout, xs[1], weights)
        kept = weights if factors is None else weights * factors
        y = einsum("bhqs,bhsk->bhqk", kept.astype(v.dtype), v)
        sees_keys = total > 0
        y = y / jnp.where(sees_keys, total, 1)
        # The log-sum-exp of a query that sees no key is FLOOR and not -inf, because the backward
        # pass then computes the weights exp(-inf - FLOOR) = 0 for this query, and not NaN.
        lse = jnp.where(sees_keys, top + jnp.log(jnp.where(sees_keys, total, 1)), FLOOR)
        return y.astype(v.dtype), lse

    y, lse = jax.lax.map(attend_tile, (tiles, jnp.arange(tiles.queries.shape[0])))
    return (y, lse), (tiles, k, v, mask, dropout, y, lse)


def _backward(residuals: tuple, gradients: tuple[Array, Array]) -> tuple:
    tiles, k, v, mask, dropout, y, normalizer = residuals
    gradient, lse_gradient = gradients
    # The gradient of a logit is w (g - `mean`), where w is the attention weight, g the
    # gradient of w, and `mean` the sum of w g over the keys.
    mean = jnp.sum(gradient.astype(jnp.float32) * y.astype(jnp.float32), axis=-1, keepdims=True)
    mean -= lse_gradient

    def add_tile(sums: tuple[Array, Array], xs: tuple) -> tuple[tuple[Array, Array], tuple]:
        tile, index, g, mean, normalizer = xs
        weights = jnp.exp(_logits(tile, k, mask) - normalizer)
        d_kept = einsum("bhqk,bhsk->bhqs", g, v)
        factors = _factors(dropout, index, weights)
        kept = weights if factors is None else weights * factors
        d_weights = d_kept if factors is None else d_kept * factors
        d_logits = weights * (d_weights - mean)
        d_bias = None if tile.bias is None else sum_leading(d_logits, 1)
        d_logits, kept = d_logits.astype(k.dtype), kept.astype(v.dtype)
        d_k = sums[0] + einsum("bhqs,bhqk->bhsk", d_logits, tile.queries)
        d_v = sums[1] + einsum("bhqs,bhqk->bhsk", kept, g)
        return (d_k, d_v), (einsum("bhqs,bhsk->bhqk", d_logits, k).astype(k.dtype), d_bias)

    zeros = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    numbers = jnp.arange(tiles.queries.shape[0])
    (d_k, d_v), (d_q, d_bias) = jax.lax.scan(
        add_tile, zeros, (tiles, numbers, gradient, mean, normalizer)
    )
    return QueryTiles(d_q, d_bias, None), d_k.astype(k.dtype), d_v.astype(v.dtype), None, None


_attend.defvjp(_forward, _backward)
