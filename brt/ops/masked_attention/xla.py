"""Masked attention in plain XLA, in tiles of queries.

The backward pass is written out and computes the weights anew, so that no array of Q x S
is kept; where that of all queries is large, tiles of queries follow one another.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.distributed import rules
from brt.ops.dropout import Dropout
from brt.ops.reductions import sum_leading

TILE = 1 << 22  # logits that exist at a time


def attend(
    queries: Float[Array, "*B Q H K"],
    keys: Float[Array, "*B S H K"],
    values: Float[Array, "*B S H K"],
    bias: Float[Array, "H Q S"] | None,
    mask: Bool[Array, "*#B #Q S"],
    dropout: Dropout | None = None,
    *,
    tile: int = TILE,
) -> Float[Array, "*B Q H K"]:
    """See `api.attend`.

    Args:
      tile: logits that may exist at a time on a device (those of one query for all of its heads
        and leading axes do in any case).
    """
    lead, (length, heads, width) = queries.shape[:-3], queries.shape[-3:]
    q, k, v = (x.reshape(-1, *x.shape[-3:]).swapaxes(1, 2) for x in (queries, keys, values))
    mask = jnp.broadcast_to(mask, (*lead, *mask.shape[-2:])).reshape(-1, *mask.shape[-2:])
    shared = rules.shard_count("lanes", lead[0]) * rules.shard_count("heads", heads) if lead else 1
    each = max(min(length, tile // max(q.shape[0] * heads * k.shape[2] // shared, 1)), 1)
    count = -(-length // each)
    each = -(-length // count)  # tiles of one size, with as few rows too many as can be
    tiles = Tiles(
        _cut(q, 2, count, each),
        None if bias is None else _cut(bias, 1, count, each),
        _cut(mask, 1, count, each) if mask.shape[1] > 1 else None,
    )
    replicated = None if tiles.mask is not None else mask
    y = _attend(tiles, k, v, replicated, dropout)
    y = jnp.moveaxis(y, 0, 2).reshape(*y.shape[1:3], -1, width)[:, :, :length]
    return y.swapaxes(1, 2).reshape(queries.shape)


class Tiles(NamedTuple):
    """N tiles of queries, with what is theirs; None: no bias, or a mask that all queries share."""

    queries: Float[Array, "N B H Q K"]
    bias: Float[Array, "N H Q S"] | None
    mask: Bool[Array, "N B Q S"] | None


def _cut(x: Array, axis: int, count: int, each: int) -> Array:
    """Tiles of an axis in front, the last one filled up with zeros."""
    short = count * each - x.shape[axis]
    x = jnp.pad(x, [(0, short if i == axis else 0) for i in range(x.ndim)]) if short else x
    return jnp.moveaxis(x.reshape(*x.shape[:axis], count, each, *x.shape[axis + 1 :]), axis, 0)


@jax.custom_vjp
def _attend(tiles: Tiles, k: Array, v: Array, mask: Array | None, dropout: Dropout | None) -> Array:
    return _forward(tiles, k, v, mask, dropout)[0]


def _product(spec: str, a: Array, b: Array) -> Array:
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)


def _logits(tile: Tiles, k: Array, mask: Array | None) -> Array:
    logits = _product("bhqk,bhsk->bhqs", tile.queries, k)
    if tile.bias is not None:
        logits += tile.bias[None]
    mask = tile.mask if mask is None else mask
    return jnp.where(jnp.expand_dims(mask, 1), logits, -jnp.inf)


def _factors(
    dropout: Dropout | None, index: Array, like: Float[Array, "B H Q S"]
) -> Float[Array, "B H Q S"] | None:
    """Returns what dropout multiplies the weights of tile `index` with.

    Every query draws by its own place in the sequence. How many queries a tile has depends on how
    many lanes a device has, and a run must not depend on how many devices share it.
    """
    if dropout is None:
        return None
    lanes, heads, length, keys = like.shape

    def of_query(place: Int[Array, ""]) -> Float[Array, "B H S"]:
        return dropout.part(place).factors((lanes, heads, keys), like.dtype)

    return jnp.moveaxis(jax.vmap(of_query)(index * length + jnp.arange(length)), 0, 2)


def _forward(
    tiles: Tiles, k: Array, v: Array, mask: Array | None, dropout: Dropout | None
) -> tuple[Array, tuple]:
    lowest = jnp.finfo(jnp.float32).min

    def of_tile(xs: tuple[Tiles, Array]) -> tuple[Array, Array]:
        logits = _logits(xs[0], k, mask)
        top = jnp.maximum(jnp.max(logits, axis=-1, keepdims=True), lowest)
        weights = jnp.exp(logits - top)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        factors = _factors(dropout, xs[1], weights)
        kept = weights if factors is None else weights * factors
        y = _product("bhqs,bhsk->bhqk", kept.astype(v.dtype), v)
        some = total > 0
        y = y / jnp.where(some, total, 1)
        # Where nothing is seen any finite number will do: exp(-inf - it) = 0.
        return y.astype(v.dtype), jnp.where(some, top + jnp.log(jnp.where(some, total, 1)), 0)

    y, normalizer = jax.lax.map(of_tile, (tiles, jnp.arange(tiles.queries.shape[0])))
    return y, (tiles, k, v, mask, dropout, y, normalizer)


def _backward(residuals: tuple, gradient: Array) -> tuple:
    tiles, k, v, mask, dropout, y, normalizer = residuals
    along = jnp.sum(gradient.astype(jnp.float32) * y.astype(jnp.float32), axis=-1, keepdims=True)

    def of_tile(sums: tuple[Array, Array], xs: tuple) -> tuple[tuple[Array, Array], tuple]:
        tile, index, g, along, normalizer = xs
        weights = jnp.exp(_logits(tile, k, mask) - normalizer)
        d_kept = _product("bhqk,bhsk->bhqs", g, v)
        factors = _factors(dropout, index, weights)
        kept = weights if factors is None else weights * factors
        d_weights = d_kept if factors is None else d_kept * factors
        d_logits = weights * (d_weights - along)
        d_bias = None if tile.bias is None else sum_leading(d_logits, 1)
        d_logits, kept = d_logits.astype(k.dtype), kept.astype(v.dtype)
        d_k = sums[0] + _product("bhqs,bhqk->bhsk", d_logits, tile.queries)
        d_v = sums[1] + _product("bhqs,bhqk->bhsk", kept, g)
        return (d_k, d_v), (_product("bhqs,bhsk->bhqk", d_logits, k).astype(k.dtype), d_bias)

    zeros = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    numbers = jnp.arange(tiles.queries.shape[0])
    (d_k, d_v), (d_q, d_bias) = jax.lax.scan(
        of_tile, zeros, (tiles, numbers, gradient, along, normalizer)
    )
    return Tiles(d_q, d_bias, None), d_k.astype(k.dtype), d_v.astype(v.dtype), None, None


_attend.defvjp(_forward, _backward)
