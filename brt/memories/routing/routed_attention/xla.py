"""Routed attention (see `api.py`) in plain XLA: the tokens of a cluster are copied into small
chunks, so that attention to a cluster becomes attention to neighbouring chunks.

A group is the tokens of one cluster in one document. The tokens of a group fill chunk after chunk,
and no chunk has tokens of two groups. The place of a token in its chunk, and the tokens before it,
therefore depend on earlier tokens alone, and the token's result is bitwise the same for any later
tokens. In shapes, M is the number of tokens of the rings and the segment, and P of chunks of Q
rows. The other letters of shapes are those of `brt.layers.state`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from brt.memories.routing.routed_attention.rings import (
    NO_TOKEN,
    Rings,
    RoutedTokens,
    readable_tokens,
)
from brt.ops.gathering import take
from brt.ops.partial_attention import attend_to_part
from brt.ops.products import matmul_nt
from brt.ops.softmax import MASKED

# A chunk has at least this number of rows, or R rows if R is smaller. Smaller chunks would save
# some work, but handling more chunks would cost more than that.
MIN_CHUNK = 8


class ChunkLayout(NamedTuple):
    """The assignment of the M tokens to the Z = P Q rows of all chunks."""

    sources: Int[Array, "B H Z"]  # The index of the token in each row; M for an empty row.
    rows: Int[Array, "B H M"]  # The row of each token; Z for places without a token.


def routed_attention(
    queries: Float[Array, "B T H K"],
    tokens: RoutedTokens,
    rings: Rings,
    document_start: Bool[Array, "B N"],
    bias: Float[Array, "H R"],
    *,
    attend_to_self: bool,
) -> Float[Array, "B T H K"]:
    """Computes `api.routed_attention` in chunks of tokens of one cluster and one document."""
    visible = readable_tokens(tokens, rings, document_start)
    count, blocks = queries.shape[1], document_start.shape[1]
    clusters, bias_length = rings.keys.shape[2], bias.shape[1]
    # In every cluster of every document, one chunk may not be full. `chunks` is large enough for
    # the case that each of these chunks has a single token.
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
    begins = jnp.pad(
        ordered[..., 1:] != ordered[..., :-1], ((0, 0), (0, 0), (1, 0)), constant_values=True
    )
    rank = index - jax.lax.cummax(jnp.where(begins, index, 0), axis=2)
    there = ordered != NO_TOKEN
    chunk = jnp.cumsum(there & (rank % size == 0), axis=-1) - 1
    rows = jnp.where(there, chunk * size + rank % size, chunks * size)

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
