"""Causal attention by content (after Roy et al. 2020, Routing Transformers).

In the paper a cluster takes the tokens of a complete sequence that fit it best, so a token depends
on later tokens; the public code leaks in this way. Here a token belongs to the cluster that its own
query fits best, and reads the last R tokens of that cluster in its document. No token is omitted or
read twice, and nothing depends on later tokens.

Queries are used as keys, as in the paper's decoders, so one set of centroids suits both. In shapes,
C is the number of clusters of a head, and R the number of tokens of its cluster that a token reads.
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
    """Attends from every token of a segment.

    Args:
      queries: already multiplied by any scale.
      tokens: the segment's tokens.
      rings: the tokens before the segment; nothing of them is read after the start of a document.
      document_start: True where a document starts.
      bias: float32, added to the logits of the cluster's last R tokens, the nearest first.
      attend_to_self: True if the nearest token is the token itself.
      implementation: the name of an implementation; None selects the best one that supports the
        inputs.

    Returns:
      The outputs in the dtype of the values, with the softmax in float32. Zeros where a token reads
        nothing.

    Raises:
      NotImplementedError: the implementation does not exist or does not support the inputs.
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
    """Computes `routed_attention` for the token at `position` of `block`, which contains it
    already.
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
