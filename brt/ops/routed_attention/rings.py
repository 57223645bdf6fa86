"""The last tokens of every cluster: what is carried on, and what a segment adds to it.

Letters beside the glossary's: C clusters of a head, R tokens of each that are kept, M = C R + T
places, of which the first are those of the rings.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.ops.memory_attention.retrieval import take

NOWHERE = -1  # the group of a place where nothing is


class Rings(NamedTuple):
    """The last R tokens of every cluster.

    Attributes:
      keys: [B, H, C, R, K], oldest first; zeros before the first.
      values: [B, H, C, R, K].
      filled: int32 [B, H, C], how many there are: the last so many.
    """

    keys: Float[Array, "B H C R K"]
    values: Float[Array, "B H C R K"]
    filled: Int[Array, "B H C"]


class Routed(NamedTuple):
    """Tokens, and the clusters that they are of."""

    keys: Float[Array, "B T H K"]
    values: Float[Array, "B T H K"]
    clusters: Int[Array, "B T H"]


class Places(NamedTuple):
    """All that a segment can read, in the order in which it was read.

    Attributes:
      groups: int32, the same for tokens of one cluster and one document; NOWHERE: none.
    """

    keys: Float[Array, "B H M K"]
    values: Float[Array, "B H M K"]
    groups: Int[Array, "B H M"]


def is_filled(rings: Rings) -> Bool[Array, "B H C R"]:
    """Which places of the rings have a token."""
    size = rings.keys.shape[3]
    return jnp.arange(size)[None, None, None] >= size - rings.filled[..., None]


def places(tokens: Routed, rings: Rings, document_start: Bool[Array, "B N"]) -> Places:
    """Rings, then the segment. Rings are of the document before its first start."""
    clusters, width = rings.keys.shape[2], tokens.keys.shape[1] // document_start.shape[1]
    documents = jnp.repeat(jnp.cumsum(document_start, axis=1, dtype=jnp.int32), width, axis=1)
    of_tokens = documents[:, None] * clusters + tokens.clusters.swapaxes(1, 2)
    own = jnp.arange(clusters, dtype=jnp.int32)[None, None, :, None]
    there = is_filled(rings) & ~document_start[:, :1, None, None]
    of_rings = jnp.where(there, own, NOWHERE)
    of_rings = of_rings.reshape(*of_rings.shape[:2], -1)
    pairs = (rings.keys, tokens.keys), (rings.values, tokens.values)
    keys, values = (
        jnp.concatenate([r.reshape(*r.shape[:2], -1, r.shape[-1]), t.swapaxes(1, 2)], axis=2)
        for r, t in pairs
    )
    return Places(keys, values, jnp.concatenate([of_rings, of_tokens], axis=2))


def rings_after(tokens: Routed, rings: Rings, document_start: Bool[Array, "B N"]) -> Rings:
    """The rings behind a segment: the last tokens of its last document."""
    clusters, size = rings.keys.shape[2:4]
    here = places(tokens, rings, document_start)
    last = jnp.sum(document_start, axis=1, dtype=jnp.int32)
    wanted = last[:, None] * clusters + jnp.arange(clusters, dtype=jnp.int32)[None]
    wanted = wanted[:, None, :, None]
    there = here.groups[:, :, None]
    counts = jnp.sum(there == wanted, axis=-1, dtype=jnp.int32)
    ends = jnp.sum(there <= wanted, axis=-1, dtype=jnp.int32)  # in the order of groups
    order = jnp.argsort(here.groups, axis=-1, stable=True)
    places_in_order = jnp.maximum(ends[..., None] - size + jnp.arange(size)[None, None, None], 0)
    flat = places_in_order.reshape(*ends.shape[:2], -1)
    chosen = jnp.take_along_axis(order, flat, axis=-1).reshape(places_in_order.shape)
    keys, values = (take(x, chosen) for x in here[:2])
    after = Rings(keys, values, jnp.minimum(counts, size))
    kept = is_filled(after)[..., None]
    return after._replace(keys=jnp.where(kept, keys, 0), values=jnp.where(kept, values, 0))
