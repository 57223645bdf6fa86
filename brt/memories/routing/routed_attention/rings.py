"""The last tokens of every cluster, which are carried from segment to segment.

The last R tokens of a cluster are called the ring of the cluster. In shapes, C is the number of
clusters of a head. A segment reads M = C R + T places for tokens: first the places of all rings,
then one place for each token of the segment. The other letters of shapes are those of
`brt.layers.state`.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.ops.gathering import take

NO_TOKEN = -1  # `ReadableTokens.groups` has this number for a place without a token.


class Rings(NamedTuple):
    """The last R tokens of every cluster, oldest token first."""

    keys: Float[Array, "B H C R K"]
    values: Float[Array, "B H C R K"]
    # The number of tokens in each ring. They are in its last places; the others are zeros.
    filled: Int[Array, "B H C"]


class RoutedTokens(NamedTuple):
    """The tokens of a segment or a block, and the index of each token's cluster in each head."""

    keys: Float[Array, "B T H K"]
    values: Float[Array, "B T H K"]
    clusters: Int[Array, "B T H"]


class ReadableTokens(NamedTuple):
    """All tokens that the tokens of a segment may read: the rings, followed by the segment. The
    tokens of a cluster stand in the order of the text.
    """

    keys: Float[Array, "B H M K"]
    values: Float[Array, "B H M K"]
    # Equal numbers for tokens of the same cluster and document; NO_TOKEN for empty places.
    groups: Int[Array, "B H M"]


def ring_mask(rings: Rings) -> Bool[Array, "B H C R"]:
    size = rings.keys.shape[3]
    return jnp.arange(size)[None, None, None] >= size - rings.filled[..., None]


def readable_tokens(
    tokens: RoutedTokens, rings: Rings, document_start: Bool[Array, "B N"]
) -> ReadableTokens:
    """Returns the tokens of the rings, followed by the tokens of the segment.

    The tokens of the rings belong to the document that is being read when the segment begins, so no
    token reads them if a document starts with the first block.
    """
    clusters, width = rings.keys.shape[2], tokens.keys.shape[1] // document_start.shape[1]
    documents = jnp.repeat(jnp.cumsum(document_start, axis=1, dtype=jnp.int32), width, axis=1)
    token_groups = documents[:, None] * clusters + tokens.clusters.swapaxes(1, 2)
    own = jnp.arange(clusters, dtype=jnp.int32)[None, None, :, None]
    there = ring_mask(rings) & ~document_start[:, :1, None, None]
    ring_groups = jnp.where(there, own, NO_TOKEN)
    ring_groups = ring_groups.reshape(*ring_groups.shape[:2], -1)
    pairs = (rings.keys, tokens.keys), (rings.values, tokens.values)
    keys, values = (
        jnp.concatenate([r.reshape(*r.shape[:2], -1, r.shape[-1]), t.swapaxes(1, 2)], axis=2)
        for r, t in pairs
    )
    return ReadableTokens(keys, values, jnp.concatenate([ring_groups, token_groups], axis=2))


def rings_after(tokens: RoutedTokens, rings: Rings, document_start: Bool[Array, "B N"]) -> Rings:
    """Returns the rings after a segment: the last R tokens of each cluster in its last document.

    If no document starts in the segment, this document started in an earlier segment, and tokens of
    `rings` stay in a ring until R newer tokens have replaced them.
    """
    clusters, size = rings.keys.shape[2:4]
    visible = readable_tokens(tokens, rings, document_start)
    last = jnp.sum(document_start, axis=1, dtype=jnp.int32)
    wanted = last[:, None] * clusters + jnp.arange(clusters, dtype=jnp.int32)[None]
    wanted = wanted[:, None, :, None]
    there = visible.groups[:, :, None]
    counts = jnp.sum(there == wanted, axis=-1, dtype=jnp.int32)
    # `wanted` are the groups of the segment's last document, one for each cluster. `ends` are the
    # indices at which these groups end if the places are sorted by group.
    ends = jnp.sum(there <= wanted, axis=-1, dtype=jnp.int32)
    order = jnp.argsort(visible.groups, axis=-1, stable=True)
    places_in_order = jnp.maximum(ends[..., None] - size + jnp.arange(size)[None, None, None], 0)
    flat = places_in_order.reshape(*ends.shape[:2], -1)
    chosen = jnp.take_along_axis(order, flat, axis=-1).reshape(places_in_order.shape)
    keys, values = (take(x, chosen) for x in visible[:2])
    after = Rings(keys, values, jnp.minimum(counts, size))
    kept = ring_mask(after)[..., None]
    return after._replace(keys=jnp.where(kept, keys, 0), values=jnp.where(kept, values, 0))
