"""Causal clustered attention in plain XLA.

The tokens of all blocks read at once, those of a block sorted by their centroids, so that what
a centroid keeps is gathered once for several of its queries.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from brt.ops.causal_clustered_attention.past import (
    Centroids,
    Past,
    is_filled,
    kept,
    nearest,
    past_after,
)
from brt.ops.clustered_attention.members import (
    QueryTiles,
    build_tiles,
    from_tiles,
    gather_by_label,
    to_tiles,
)
from brt.ops.partial_attention import AttentionPart, attend_to_part, merge_parts
from brt.ops.softmax import MASKED


def past_scan(
    keys: Float[Array, "B Z H K"],
    values: Float[Array, "B Z H K"],
    cache_mask: Bool[Array, "B N"],
    past: Past,
    centroids: Centroids,
) -> tuple[Past, Past]:
    """See `api.past_scan`."""

    def body(past: Past, block: tuple[Array, Array, Bool[Array, " B"]]) -> tuple[Past, Past]:
        past = kept(past, block[2])
        return past_after(past, *block, centroids), past

    return jax.lax.scan(body, past, (*_before(keys, values, cache_mask), cache_mask.T))


def causal_clustered_attention(
    queries: Float[Array, "B T H K"],
    window: AttentionPart,
    keys: Float[Array, "B Z H K"],
    values: Float[Array, "B Z H K"],
    cache_mask: Bool[Array, "B N"],
    pasts: Past,
    centroids: Centroids,
    bias: Float[Array, " H"],
    *,
    attend_to_self: bool,
) -> Float[Array, "B T H K"]:
    """See `api.causal_clustered_attention`."""
    blocks = cache_mask.shape[1]
    width = queries.shape[1] // blocks
    left = jnp.asarray(np.tri(width, k=0 if attend_to_self else -1, dtype=bool))

    def of_block(
        queries: Float[Array, "B H W K"],
        window: AttentionPart,
        before: tuple[Array, Array],
        cache_mask: Bool[Array, " B"],
        past: Past,
    ) -> Float[Array, "B H W K"]:
        mask = left[None] & cache_mask[:, None, None]
        return read(queries, window, *before, mask, past, centroids, bias)

    parts = AttentionPart(*(_blocks(x, blocks) for x in window))
    before = _before(keys, values, cache_mask)
    y = jax.vmap(of_block)(_blocks(queries, blocks), parts, before, cache_mask.T, pasts)
    return y.transpose(1, 0, 3, 2, 4).reshape(queries.shape)


def _before(
    keys: Float[Array, "B Z H K"], values: Float[Array, "B Z H K"], cache_mask: Bool[Array, "B N"]
) -> tuple[Float[Array, "N B H W K"], Float[Array, "N B H W K"]]:
    """Of every block of the segment, the block before it."""
    blocks = cache_mask.shape[1]
    tokens = keys.shape[1] // (blocks + 1) * blocks
    return _blocks(keys[:, :tokens], blocks), _blocks(values[:, :tokens], blocks)


def _blocks(x: Float[Array, "B T H *K"], blocks: int) -> Float[Array, "N B H W *K"]:
    cut = x.reshape(x.shape[0], blocks, -1, *x.shape[2:])
    return jnp.moveaxis(cut, (1, 3), (0, 2))


def read(
    queries: Float[Array, "B H Q K"],
    window: AttentionPart,
    keys: Float[Array, "B H W K"],
    values: Float[Array, "B H W K"],
    mask: Bool[Array, "B Q W"],
    past: Past,
    centroids: Centroids,
    bias: Float[Array, " H"],
) -> Float[Array, "B H Q K"]:
    """What the queries of a block read, in the dtype of `values`.

    Args:
      window: what they read in their windows.
      keys, values: of the block before theirs.
      mask: which of these have left a query's window.
    """
    logits = _product("bhqk,bhsk->bhqs", queries, keys) + bias[None, :, None, None]
    nearby = attend_to_part(jnp.where(mask[:, None], logits, MASKED), values)
    y = merge_parts([window, nearby, _far(queries, past, centroids, bias)])
    return y.output.astype(values.dtype)


def _far(
    queries: Float[Array, "B H Q K"], past: Past, centroids: Centroids, bias: Float[Array, " H"]
) -> AttentionPart:
    """The keys that a query's centroid keeps, and the rest as that reads them."""
    clusters, tokens = past.keys.shape[2], queries.shape[2]
    size = max(tokens // (2 * clusters), 1)
    tiles = build_tiles(nearest(queries, centroids), clusters=clusters, size=size)
    keys, values, rest, lse = (_of_tiles(x, tiles) for x in past[:-1])
    of_head = bias[None, :, None, None]
    logits = _product("bhnmk,bhnrk->bhnmr", to_tiles(queries, tiles), keys) + of_head[..., None]
    there = is_filled(past)[:, None, None, None]
    best = attend_to_part(jnp.where(there, logits, MASKED), values)
    far = merge_parts([best, AttentionPart(rest[:, :, :, None], lse[..., None] + of_head)])
    return AttentionPart(
        from_tiles(far.output, tiles), from_tiles(far.lse[..., None], tiles)[..., 0]
    )


def _of_tiles(x: Float[Array, "B H C *R"], tiles: QueryTiles) -> Float[Array, "B H N *R"]:
    """What belongs to the centroid of every tile."""
    flat = x.reshape(*x.shape[:3], -1)
    return gather_by_label(flat, tiles.clusters).reshape(*tiles.clusters.shape, *x.shape[3:])


def _product(spec: str, a: Array, b: Array) -> Array:
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)
