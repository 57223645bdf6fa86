"""Routed attention in plain XLA: tokens of a cluster side by side, in chunks of a few.

A chunk is of one document and one cluster, and begins a whole number of chunks behind the first
token of these. So where a token stands in its chunk, and what stands around it, depends on what
came before it alone, and what it reads is the same bit by bit whatever comes after it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from brt.ops.memory_attention.retrieval import take
from brt.ops.partial_attention import attend_to_part
from brt.ops.products import matmul_nt
from brt.ops.routed_attention.rings import NOWHERE, Rings, Routed, places
from brt.ops.softmax import MASKED

LEAST = 8  # tokens of a chunk: what of smaller ones is saved, their number costs


class Layout(NamedTuple):
    """Where what lies.

    Attributes:
      sources: int32 [B, H, P * Q], the place of every row of P chunks of Q rows; M: of none.
      rows: int32 [B, H, M], the row of every place; P * Q: of none.
    """

    sources: Int[Array, "B H Z"]
    rows: Int[Array, "B H M"]


def routed_attention(
    queries: Float[Array, "B T H K"],
    tokens: Routed,
    rings: Rings,
    document_start: Bool[Array, "B N"],
    bias: Float[Array, "H R"],
    *,
    attend_to_self: bool,
) -> Float[Array, "B T H K"]:
    """See `api.routed_attention`."""
    here = places(tokens, rings, document_start)
    count, blocks = queries.shape[1], document_start.shape[1]
    clusters, reach = rings.keys.shape[2], bias.shape[1]
    # Every cluster of every document may have a chunk that is not full.
    size = min(max(count // (blocks * clusters), LEAST), reach)
    total = here.groups.shape[-1]
    chunks = (total + blocks * clusters * (size - 1)) // size
    layout = _layout(here.groups, chunks, size)
    sources = layout.sources.reshape(*layout.sources.shape[:2], chunks, size)

    def row_major(x: Float[Array, "B H M K"]) -> Float[Array, "B H P Q K"]:
        padded = jnp.pad(x, ((0, 0), (0, 0), (0, 1), (0, 0)))
        return take(padded, sources)

    q = jnp.pad(queries.swapaxes(1, 2), ((0, 0), (0, 0), (total - count, 0), (0, 0)))
    groups = jnp.pad(here.groups, ((0, 0), (0, 0), (0, 1)), constant_values=NOWHERE)
    groups = jnp.take_along_axis(groups, layout.sources, axis=-1).reshape(sources.shape)
    nearest = 0 if attend_to_self else 1
    back = -(-(reach - 1 + nearest) // size)  # chunks that a chunk reads beside itself
    keys, values = (_with_those_before(row_major(x), back, 0) for x in (here.keys, here.values))
    of_keys = _with_those_before(groups, back, NOWHERE)
    columns = np.arange((back + 1) * size)
    distance = np.arange(size)[:, None] + back * size - columns[None] - nearest
    near = jnp.asarray((distance >= 0) & (distance < reach))[None, None, None]
    seen = near & (groups[..., None] == of_keys[..., None, :]) & (groups >= 0)[..., None]
    logits = matmul_nt(row_major(q), keys) + bias[:, np.clip(distance, 0, reach - 1)][None, :, None]
    y = attend_to_part(jnp.where(seen, logits, MASKED), values).output
    y = y.reshape(*y.shape[:2], -1, y.shape[-1])
    results = take(y, layout.rows[:, :, -count:, None])[:, :, :, 0]
    return results.swapaxes(1, 2).astype(tokens.values.dtype)


def _layout(groups: Int[Array, "B H M"], chunks: int, size: int) -> Layout:
    total = groups.shape[-1]
    order = jnp.argsort(groups, axis=-1, stable=True)
    ordered, index = jnp.take_along_axis(groups, order, axis=-1), jnp.arange(total)[None, None]
    begins = jnp.pad(
        ordered[..., 1:] != ordered[..., :-1], ((0, 0), (0, 0), (1, 0)), constant_values=True
    )
    rank = index - jax.lax.cummax(jnp.where(begins, index, 0), axis=2)
    there = ordered != NOWHERE
    chunk = jnp.cumsum(there & (rank % size == 0), axis=-1) - 1
    rows = jnp.where(there, chunk * size + rank % size, chunks * size)

    def scattered(order: Int[Array, " M"], rows: Int[Array, " M"]) -> Layout:
        sources = jnp.full((chunks * size,), total).at[rows].set(order, mode="drop")
        return Layout(sources, jnp.zeros((total,), rows.dtype).at[order].set(rows))

    return jax.vmap(jax.vmap(scattered))(order, rows)


def _with_those_before(x: Array, back: int, nothing: int) -> Array:
    """[B, H, P, (back + 1) * Q, ...]: every chunk behind those before it."""
    pad = [(0, 0)] * x.ndim
    pad[2] = (back, 0)
    padded = jnp.pad(x, pad, constant_values=nothing)
    return jnp.concatenate([padded[:, :, i : i + x.shape[2]] for i in range(back + 1)], axis=3)
