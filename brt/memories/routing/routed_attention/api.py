"""Causal attention of tokens to tokens with similar queries (after Roy et al. 2020, Routing
Transformers).

The queries of a head form clusters with learned centroids. In the paper, each cluster selects the
tokens of a complete sequence that are nearest to its centroid. The selection therefore depends on
later tokens; the paper's public code also has this leak. Here, each token selects the cluster whose
centroid is nearest to its query, and reads the last R tokens of that cluster in its document. Every
token belongs to exactly one cluster of a head, and nothing depends on later tokens.

Queries are used as keys, as in the paper's decoders, so queries and keys share one set of
centroids. The letters of shapes are those of `brt.layers.state`.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.memories.routing.routed_attention import reference, xla
from brt.memories.routing.routed_attention.rings import Rings, RoutedTokens
from brt.ops import dispatch
from brt.ops.dispatch import Implementation, Op
from brt.ops.partial_attention import attend_to_part
from brt.ops.products import matmul_nt
from brt.ops.softmax import MASKED

OP = Op(
    "routed_attention",
    (
        Implementation("xla", xla.routed_attention),
        Implementation("reference", reference.routed_attention, auto=()),
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
    position: Int[Array, ""],
    bias: Float[Array, "H R"],
    *,
    attend_to_self: bool = True,
) -> Float[Array, "B 1 H K"]:
    """Computes `routed_attention` for one token of each row, the token at `position` of `block`.
    Entries of the block after this token are ignored; `rings` are those before the block.
    """
    bias_length, place = bias.shape[1], jnp.arange(block.keys.shape[1])
    nearest = 0 if attend_to_self else 1
    chosen = cluster[:, :, None, None, None]
    ring_vectors = (
        jnp.take_along_axis(x, chosen, axis=2)[:, :, 0] for x in (rings.keys, rings.values)
    )
    filled = jnp.take_along_axis(rings.filled, cluster[..., None], axis=2)
    same = (block.clusters.swapaxes(1, 2) == cluster[..., None]) & (place <= position)[None, None]
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
