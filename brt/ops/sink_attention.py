"""Attention to the first tokens of a document (the sinks) after they have left the window.

A decoder that was pretrained without a window attends strongly to the first tokens of its context
(attention sinks, Xiao et al. 2023) and breaks without them. The keys and values of the sinks are
therefore kept, and count as if they stood right before the window: token p sees sink j at the
distance min(p, F + S) - j, where F is the distance of the farthest key of a window.

In shapes, N is the number of blocks of a segment, L the number of tokens of a block, S the number
of sinks, H the number of heads of queries, and G the number of heads of keys. Each head of keys
serves H / G consecutive heads of queries.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brt.ops.partial_attention import AttentionPart
from brt.ops.positions import RotarySpeeds, rotate, rotations, take_positions
from brt.ops.softmax import MASKED, soft_capped


def with_sinks(
    part: AttentionPart,
    queries: Float[Array, "B T H K"],
    keys: Float[Array, "B N S G K"],
    values: Float[Array, "B N S G K"],
    places: Int[Array, "B T"],
    bias: Float[Array, " H"] | None,
    *,
    farthest: int,
    soft_cap: float = 0.0,
    speeds: RotarySpeeds | None = None,
) -> AttentionPart:
    """Returns the attention to the window and the sinks beyond it, in the dtype of `part.output`.

    Args:
      part: the attention to the window.
      queries: already normalized and multiplied by any scale, but not rotated.
      keys, values: the keys, not rotated, and the values of the first S tokens of the document to
        which each block belongs. Entries of tokens that have not been read yet are ignored.
      places: the index of each token in its document.
      bias: the position bias of each head, which is the same for all sinks.
      farthest: F; sinks at this distance or nearer belong to the window and are masked here.
    """
    # Few keys are sinks, so they are repeated for each head of queries. The tokens are on the last
    # axis of the logits, because the registers of TPUs have 128 lanes.
    batch, length, heads, size = queries.shape
    blocks, count, groups = keys.shape[1:4]
    if speeds is not None:
        reach = farthest + count
        table = rotations(0, reach + 1, speeds)
        queries = rotate(queries, take_positions(table, jnp.minimum(places, reach)))
        sinks = take_positions(table, jnp.arange(count))
        keys = rotate(keys.reshape(batch * blocks, count, groups, size), sinks).reshape(keys.shape)
    keys, values = (jnp.repeat(x, heads // groups, axis=3) for x in (keys, values))
    rows = queries.reshape(batch, blocks, -1, heads, size)
    # The axes of `logits` are [B, N, H, S, tokens of a block].
    logits = jnp.einsum("bnshk,bnlhk->bnhsl", keys, rows, preferred_element_type=jnp.float32)
    logits = soft_capped(logits, soft_cap)
    if bias is not None:
        logits += bias.reshape(1, 1, heads, 1, 1)
    order = jnp.arange(count).reshape(1, 1, 1, count, 1)
    left = places.reshape(batch, blocks, 1, 1, -1) - order > farthest
    logits = jnp.where(left, logits, MASKED)
    window = jnp.moveaxis(part.lse.reshape(batch, blocks, -1, heads, 1), 2, 4)
    top = jax.lax.stop_gradient(jnp.maximum(window, jnp.max(logits, axis=3, keepdims=True)))
    of_sinks, of_window = jnp.exp(logits - top), jnp.exp(window - top)
    total = of_window + jnp.sum(of_sinks, axis=3, keepdims=True)
    weights = (of_sinks / total).astype(values.dtype)
    read = jnp.einsum("bnhsl,bnshk->bnlhk", weights, values, preferred_element_type=jnp.float32)

    def by_token(x: Float[Array, "B N H 1 L"]) -> Float[Array, "B T H"]:
        return jnp.moveaxis(x[:, :, :, 0], 2, 3).reshape(batch, length, heads)

    output = by_token(of_window / total)[..., None] * part.output + read.reshape(queries.shape)
    return AttentionPart(output.astype(part.output.dtype), by_token(top + jnp.log(total)))
