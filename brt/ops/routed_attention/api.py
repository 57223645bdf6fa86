"""Attention by content, and causal (after Roy et al. 2020, Routing Transformers).

The paper's clusters take the tokens of a whole sequence that fit them best, so that what a token
reads depends on which tokens come after it; the public codes leak so. Here a token is of the
cluster that its own query fits best, and reads the last R tokens of that cluster in its document:
no token is left out, none is read twice, and nothing depends on what comes later.

Queries are keys, as in the paper's decoders; one set of centroids suits both.

Letters beside the glossary's: C clusters of a head, R tokens of its cluster that a token reads.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.ops import dispatch
from brt.ops.dispatch import Implementation, Op
from brt.ops.partial_attention import attend_to_part
from brt.ops.products import matmul_nt
from brt.ops.routed_attention import reference, xla
from brt.ops.routed_attention.rings import Rings, Routed
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
    tokens: Routed,
    rings: Rings,
    document_start: Bool[Array, "B N"],
    bias: Float[Array, "H R"],
    *,
    attend_to_self: bool = True,
    implementation: str | None = None,
) -> Float[Array, "B T H K"]:
    """What every token of a segment reads.

    Args:
      queries: with any scale folded in.
      tokens: the segment's.
      rings: what was before it; nothing of them is read where a document starts.
      bias: float32, added to the logits of the cluster's last R tokens, nearest first.
      attend_to_self: whether the nearest is the token itself.
      implementation: a named one runs or raises; None takes the best that can.

    Returns:
      In the dtype of the values; softmax in float32. Zeros where a token reads nothing.

    Raises:
      NotImplementedError: an implementation that does not exist, or not for these inputs.
    """
    return dispatch.run(
        OP, implementation, queries, tokens, rings, document_start, bias,
        attend_to_self=attend_to_self,
    )  # fmt: skip


def routed_attention_step(
    queries: Float[Array, "B 1 H K"],
    cluster: Int[Array, "B H"],
    block: Routed,
    rings: Rings,
    position: Int[Array, ""],
    bias: Float[Array, "H R"],
    *,
    attend_to_self: bool = True,
) -> Float[Array, "B 1 H K"]:
    """The same for the token at `position` of the open `block`, in which it is already."""
    reach, place = bias.shape[1], jnp.arange(block.keys.shape[1])
    nearest = 0 if attend_to_self else 1
    chosen = cluster[:, :, None, None, None]
    of_rings = (jnp.take_along_axis(x, chosen, axis=2)[:, :, 0] for x in (rings.keys, rings.values))
    filled = jnp.take_along_axis(rings.filled, cluster[..., None], axis=2)
    same = (block.clusters.swapaxes(1, 2) == cluster[..., None]) & (place <= position)[None, None]
    count = jnp.sum(same, axis=-1, keepdims=True)
    back_in_block = count - jnp.cumsum(same, axis=-1)
    back_in_ring = count + jnp.arange(reach)[None, None, ::-1]
    there = jnp.arange(reach)[None, None] >= reach - filled
    back = jnp.concatenate([back_in_ring, back_in_block], axis=-1) - nearest
    seen = jnp.concatenate([there, same], axis=-1) & (back >= 0) & (back < reach)
    own = (x.swapaxes(1, 2) for x in (block.keys, block.values))
    keys, values = (jnp.concatenate(pair, axis=2) for pair in zip(of_rings, own, strict=True))
    lanes = jnp.broadcast_to(bias[None], (len(cluster), *bias.shape))
    added = jnp.take_along_axis(lanes, jnp.clip(back, 0, reach - 1), axis=-1)
    logits = matmul_nt(queries.swapaxes(1, 2), keys) + added[:, :, None]
    y = attend_to_part(jnp.where(seen[:, :, None], logits, MASKED), values).output
    return y.swapaxes(1, 2).astype(block.values.dtype)
