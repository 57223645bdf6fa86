"""Causal attention of tokens to tokens with similar queries (after Roy et al. 2020, Routing
Transformers).

The queries of a head form clusters with learned centroids. In the paper, each cluster selects the
tokens of a complete sequence that are nearest to its centroid. The selection therefore depends on
later tokens; the paper's public code also has this leak. Here, each token selects the cluster whose
centroid is nearest to its query, and reads the last R tokens of that cluster in its document. Every
token belongs to exactly one cluster of a head, and nothing depends on later tokens.

Queries are used as keys, as in the paper's decoders, so queries and keys share one set of
centroids. In shapes, C is the number of clusters of a head, R of tokens of a cluster that a token
reads, and M of tokens that the tokens of a segment may read (`ReadableTokens`). The other letters
of shapes are those of `brt.layers.state`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from brt.ops import dispatch
from brt.ops.dispatch import Implementation, Op
from brt.ops.normalization import l2_normalize
from brt.ops.partial_attention import attend_to_part
from brt.ops.products import matmul_nt
from brt.ops.softmax import MASKED
from brt.ops.top_k import take


class ClusterStatistics(NamedTuple):
    """Float32 statistics of C clusters of each head; *L is an axis of layers, if any.

    A centroid, `sums` / `counts`, is the mean of a cluster's queries, which are unit vectors. It is
    learned without gradients (Routing Transformers, section 4.1, spherical k-means). Sums start as
    unit vectors and counts start as 1, so that no sum is divided by a count near 0 at the start.
    Tokens are assigned to clusters by the directions of the centroids alone, so the length of a
    centroid does not matter.
    """

    # Moving averages, over train steps, of the number of a cluster's tokens and of the sum of their
    # queries.
    counts: Float[Array, "*L H C"]
    sums: Float[Array, "*L H C K"]
    # The number of a cluster's tokens, and the sum of their queries, since the last call of
    # `update_averages`.
    new_counts: Float[Array, "*L H C"]
    new_sums: Float[Array, "*L H C K"]


def new_statistics(heads: int, clusters: int, width: int) -> ClusterStatistics:
    """Returns initial statistics, whose pseudo-random centroids are the same in every call."""
    drawn = np.random.default_rng(0).normal(size=(heads, clusters, width))
    sums = jnp.asarray(drawn / np.linalg.norm(drawn, axis=-1, keepdims=True), jnp.float32)
    counts = jnp.ones((heads, clusters), jnp.float32)
    return ClusterStatistics(counts, sums, jnp.zeros_like(counts), jnp.zeros_like(sums))


def nearest_clusters(
    queries: Float[Array, "B T H K"], statistics: ClusterStatistics
) -> Int[Array, "B T H"]:
    """Returns the index of the cluster whose centroid has the largest cosine to each query."""
    directions = l2_normalize(statistics.sums).astype(queries.dtype)
    cosines = jnp.einsum(
        "bthk,hck->bthc", jax.lax.stop_gradient(queries), directions,
        preferred_element_type=jnp.float32,
    )  # fmt: skip
    return jnp.argmax(cosines, axis=-1).astype(jnp.int32)


def add_tokens(
    statistics: ClusterStatistics, queries: Float[Array, "B T H K"], clusters: Int[Array, "B T H"]
) -> ClusterStatistics:
    """Adds tokens to `new_counts` and `new_sums`. The centroids do not change."""
    queries = jax.lax.stop_gradient(queries).astype(jnp.float32)
    ones = jax.nn.one_hot(clusters, statistics.counts.shape[-1], dtype=jnp.float32)
    sums = jnp.einsum("bthc,bthk->hck", ones, queries)
    return statistics._replace(
        new_counts=statistics.new_counts + jnp.sum(ones, axis=(0, 1)),
        new_sums=statistics.new_sums + sums,
    )


def update_averages(statistics: ClusterStatistics, decay: float) -> ClusterStatistics:
    """Moves the averages towards `new_counts` and `new_sums`, which are then set to zero.

    A cluster without new tokens keeps its averages, which would otherwise decay to zero. A train
    step calls this function once, even if the step reads its batch in several parts. `decay` is the
    weight of the old averages.
    """
    old, new = statistics[:2], statistics[2:]
    full = statistics.new_counts > 0
    fulls = full, full[..., None]
    after = (
        jnp.where(f, decay * a + (1 - decay) * b, a)
        for f, a, b in zip(fulls, old, new, strict=True)
    )
    return ClusterStatistics(*after, *map(jnp.zeros_like, new))


def commitment(
    queries: Float[Array, "B T H K"], clusters: Int[Array, "B T H"], statistics: ClusterStatistics
) -> Float[Array, ""]:
    """Returns the mean squared distance between queries and the centroids of their clusters. As a
    loss, it keeps queries close to the centroids. The centroids get no gradient.
    """
    means = jax.lax.stop_gradient(statistics.sums / statistics.counts[..., None])
    own = jnp.einsum("bthc,hck->bthk", jax.nn.one_hot(clusters, means.shape[1]), means)
    return jnp.mean(jnp.sum(jnp.square(queries.astype(jnp.float32) - own), axis=-1))


NO_TOKEN = -1  # `ReadableTokens.groups` has this number for a place without a token.


class Rings(NamedTuple):
    """The last R tokens of every cluster, oldest token first. Rings are carried from segment to
    segment.
    """

    keys: Float[Array, "B H C R K"]
    values: Float[Array, "B H C R K"]
    # The number of tokens in each ring. The tokens are in the ring's last places; the other places
    # are zeros.
    filled: Int[Array, "B H C"]


class RoutedTokens(NamedTuple):
    """The tokens of a segment or a block, and the index of each token's cluster in each head."""

    keys: Float[Array, "B T H K"]
    values: Float[Array, "B T H K"]
    clusters: Int[Array, "B T H"]


class ReadableTokens(NamedTuple):
    """All tokens that the tokens of a segment may read: the M = C R + T places of all rings and of
    the segment. The tokens of a cluster stand in the order of the text.
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

    The tokens of the rings belong to the last document before the segment. If another document
    starts with the first block, no token reads the rings.
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
    """Returns the rings after a segment: for each cluster, the last R tokens in the last document.

    If no document starts in the segment, the tokens of the segment continue the document of
    `rings`. A token of `rings` then stays in its ring until its cluster has R newer tokens.
    """
    clusters, size = rings.keys.shape[2:4]
    visible = readable_tokens(tokens, rings, document_start)
    last = jnp.sum(document_start, axis=1, dtype=jnp.int32)
    last_groups = last[:, None] * clusters + jnp.arange(clusters, dtype=jnp.int32)[None]
    last_groups = last_groups[:, None, :, None]
    there = visible.groups[:, :, None]
    counts = jnp.sum(there == last_groups, axis=-1, dtype=jnp.int32)
    # `last_groups` are the groups of the segment's last document, one for each cluster. `ends` are
    # the indices at which these groups end if the places are sorted by group.
    ends = jnp.sum(there <= last_groups, axis=-1, dtype=jnp.int32)
    order = jnp.argsort(visible.groups, axis=-1, stable=True)
    places_in_order = jnp.maximum(ends[..., None] - size + jnp.arange(size)[None, None, None], 0)
    flat = places_in_order.reshape(*ends.shape[:2], -1)
    chosen = jnp.take_along_axis(order, flat, axis=-1).reshape(places_in_order.shape)
    keys, values = (take(x, chosen) for x in visible[:2])
    after = Rings(keys, values, jnp.minimum(counts, size))
    kept = ring_mask(after)[..., None]
    return after._replace(keys=jnp.where(kept, keys, 0), values=jnp.where(kept, values, 0))


def reference_attention(
    queries: Float[Array, "B T H K"],
    tokens: RoutedTokens,
    rings: Rings,
    document_start: Bool[Array, "B N"],
    bias: Float[Array, "H R"],
    *,
    attend_to_self: bool,
) -> Float[Array, "B T H K"]:
    """Computes `routed_attention` with a float32 logit for every pair of a query and a key."""
    visible = readable_tokens(tokens, rings, document_start)
    count, bias_length = queries.shape[1], bias.shape[1]
    total = visible.groups.shape[-1]
    place = jnp.arange(total)
    own = place[-count:]
    same = visible.groups[:, :, -count:, None] == visible.groups[:, :, None]
    same &= (place[None] <= own[:, None])[None, None]
    # The distance between a key and a query of the same cluster is the number of the cluster's
    # tokens after the key, up to and including the query.
    distance = jnp.sum(same, axis=-1, keepdims=True) - jnp.cumsum(same, axis=-1)
    distance -= 0 if attend_to_self else 1
    seen = same & (distance >= 0) & (distance < bias_length)
    far = jnp.clip(distance, 0, bias_length - 1)
    added = jnp.take_along_axis(bias[None, :, None], far.reshape(*far.shape[:2], 1, -1), axis=-1)
    q, k = (x.astype(jnp.float32) for x in (queries.swapaxes(1, 2), visible.keys))
    logits = jnp.einsum("bhtk,bhmk->bhtm", q, k) + added.reshape(far.shape)
    y = attend_to_part(jnp.where(seen, logits, MASKED), visible.values.astype(jnp.float32)).output
    return y.swapaxes(1, 2).astype(tokens.values.dtype)


# A chunk has at least this number of rows, but not more than R rows. R is the number of tokens of
# its cluster that a token reads. Smaller chunks would save some work, but handling more chunks
# would cost more than that.
MIN_CHUNK = 8


class ChunkLayout(NamedTuple):
    """The assignment of the M tokens to the Z = P Q rows of P chunks with Q rows each."""

    sources: Int[Array, "B H Z"]  # The index of the token in each row; M for an empty row.
    rows: Int[Array, "B H M"]  # The row of each token; Z for places without a token.


def xla_attention(
    queries: Float[Array, "B T H K"],
    tokens: RoutedTokens,
    rings: Rings,
    document_start: Bool[Array, "B N"],
    bias: Float[Array, "H R"],
    *,
    attend_to_self: bool,
) -> Float[Array, "B T H K"]:
    """Computes `routed_attention` in chunks of tokens. The tokens of a chunk attend to their own
    chunk and to some chunks before it.

    The tokens of one cluster in one document fill chunk after chunk. The place of a token in its
    chunk, and the tokens before it, therefore depend on earlier tokens alone. The token's result is
    bitwise the same, whatever tokens follow. In shapes, P is the number of chunks, and Q of rows of
    a chunk.
    """
    visible = readable_tokens(tokens, rings, document_start)
    count, blocks = queries.shape[1], document_start.shape[1]
    clusters, bias_length = rings.keys.shape[2], bias.shape[1]
    # In every cluster of every document, the last chunk may be partly empty. `chunks` is large
    # enough even if each last chunk has a single token.
    size = min(max(count // (blocks * clusters), MIN_CHUNK), bias_length)
    total = visible.groups.shape[-1]
    chunks = (total + blocks * clusters * (size - 1)) // size
    layout = _layout(visible.groups, chunks, size)
    sources = layout.sources.reshape(*layout.sources.shape[:2], chunks, size)

    def in_chunks(x: Float[Array, "B H M K"]) -> Float[Array, "B H P Q K"]:
        padded = jnp.pad(x, ((0, 0), (0, 0), (0, 1), (0, 0)))
        return take(padded, sources)

    q = jnp.pad(queries.swapaxes(1, 2), ((0, 0), (0, 0), (total - count, 0), (0, 0)))
    groups = jnp.pad(visible.groups, ((0, 0), (0, 0), (0, 1)), constant_values=NO_TOKEN)
    groups = jnp.take_along_axis(groups, layout.sources, axis=-1).reshape(sources.shape)
    nearest = 0 if attend_to_self else 1
    # A chunk reads this many previous chunks in addition to itself.
    back = -(-(bias_length - 1 + nearest) // size)
    keys, values = (
        _with_previous_chunks(in_chunks(x), back, 0) for x in (visible.keys, visible.values)
    )
    key_groups = _with_previous_chunks(groups, back, NO_TOKEN)
    columns = np.arange((back + 1) * size)
    distance = np.arange(size)[:, None] + back * size - columns[None] - nearest
    near = jnp.asarray((distance >= 0) & (distance < bias_length))[None, None, None]
    seen = near & (groups[..., None] == key_groups[..., None, :]) & (groups >= 0)[..., None]
    logits = (
        matmul_nt(in_chunks(q), keys)
        + bias[:, np.clip(distance, 0, bias_length - 1)][None, :, None]
    )
    y = attend_to_part(jnp.where(seen, logits, MASKED), values).output
    y = y.reshape(*y.shape[:2], -1, y.shape[-1])
    results = take(y, layout.rows[:, :, -count:, None])[:, :, :, 0]
    return results.swapaxes(1, 2).astype(tokens.values.dtype)


def _layout(groups: Int[Array, "B H M"], chunks: int, size: int) -> ChunkLayout:
    total = groups.shape[-1]
    order = jnp.argsort(groups, axis=-1, stable=True)
    ordered, index = jnp.take_along_axis(groups, order, axis=-1), jnp.arange(total)[None, None]
    is_first = jnp.pad(
        ordered[..., 1:] != ordered[..., :-1], ((0, 0), (0, 0), (1, 0)), constant_values=True
    )
    rank = index - jax.lax.cummax(jnp.where(is_first, index, 0), axis=2)
    valid = ordered != NO_TOKEN
    chunk = jnp.cumsum(valid & (rank % size == 0), axis=-1) - 1
    rows = jnp.where(valid, chunk * size + rank % size, chunks * size)

    def head_layout(order: Int[Array, " M"], rows: Int[Array, " M"]) -> ChunkLayout:
        sources = jnp.full((chunks * size,), total).at[rows].set(order, mode="drop")
        return ChunkLayout(sources, jnp.zeros((total,), rows.dtype).at[order].set(rows))

    return jax.vmap(jax.vmap(head_layout))(order, rows)


def _with_previous_chunks(x: Array, back: int, nothing: int) -> Array:
    # In the result [B, H, P, (back + 1) * Q, ...], every chunk of x [B, H, P, Q, ...] follows the
    # `back` chunks before it; `nothing` fills the chunks before the first.
    pad = [(0, 0)] * x.ndim
    pad[2] = (back, 0)
    padded = jnp.pad(x, pad, constant_values=nothing)
    return jnp.concatenate([padded[:, :, i : i + x.shape[2]] for i in range(back + 1)], axis=3)


OP = Op(
    "routed_attention",
    (
        Implementation("xla", xla_attention),
        Implementation("reference", reference_attention),
    ),
)


def routed_attention(
    queries: Float[Array, "B T H K"],
    tokens: RoutedTokens,
    rings: Rings,
    document_start: Bool[Array, "B N"],
    bias: Float[Array, "H R"],
    *,
    attend_to_self: bool = True,
    implementation: str | None = None,
) -> Float[Array, "B T H K"]:
    """Returns the attention output of every token of a segment over the last R tokens of the
    token's cluster; zeros for a token that sees no key.

    Args:
      queries: the queries, already scaled.
      rings: the last R tokens of every cluster before the segment. If a document starts in the
        segment, its tokens and all later tokens do not read `rings`.
      document_start: True where a document starts with block n.
      bias: float32, added to the logits of the cluster's last R tokens, the nearest first.
      attend_to_self: True if the R tokens that a token reads include the token itself, as the
        nearest one; False if they are the R tokens of the cluster before the token.
      implementation: None selects the best implementation that supports the inputs.
    """
    return dispatch.run(
        OP, implementation, queries, tokens, rings, document_start, bias,
        attend_to_self=attend_to_self,
    )  # fmt: skip


def routed_attention_step(
    queries: Float[Array, "B 1 H K"],
    cluster: Int[Array, "B H"],
    block: RoutedTokens,
    rings: Rings,
    position: Int[Array, " B"],
    bias: Float[Array, "H R"],
    *,
    attend_to_self: bool = True,
) -> Float[Array, "B 1 H K"]:
    """Computes `routed_attention` for one token of each row, the token at `position` of `block`.
    Entries of the block after this token are ignored. `rings` are the rings before the block.
    """
    bias_length, place = bias.shape[1], jnp.arange(block.keys.shape[1])
    nearest = 0 if attend_to_self else 1
    chosen = cluster[:, :, None, None, None]
    ring_vectors = (
        jnp.take_along_axis(x, chosen, axis=2)[:, :, 0] for x in (rings.keys, rings.values)
    )
    filled = jnp.take_along_axis(rings.filled, cluster[..., None], axis=2)
    read = (place[None] <= position[:, None])[:, None]
    same = (block.clusters.swapaxes(1, 2) == cluster[..., None]) & read
    count = jnp.sum(same, axis=-1, keepdims=True)
    back_in_block = count - jnp.cumsum(same, axis=-1)
    back_in_ring = count + jnp.arange(bias_length)[None, None, ::-1]
    there = jnp.arange(bias_length)[None, None] >= bias_length - filled
    back = jnp.concatenate([back_in_ring, back_in_block], axis=-1) - nearest
    seen = jnp.concatenate([there, same], axis=-1) & (back >= 0) & (back < bias_length)
    own = (x.swapaxes(1, 2) for x in (block.keys, block.values))
    keys, values = (jnp.concatenate(pair, axis=2) for pair in zip(ring_vectors, own, strict=True))
    lanes = jnp.broadcast_to(bias[None], (len(cluster), *bias.shape))
    added = jnp.take_along_axis(lanes, jnp.clip(back, 0, bias_length - 1), axis=-1)
    logits = matmul_nt(queries.swapaxes(1, 2), keys) + added[:, :, None]
    y = attend_to_part(jnp.where(seen[:, :, None], logits, MASKED), values).output
    return y.swapaxes(1, 2).astype(block.values.dtype)
