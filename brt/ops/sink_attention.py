"""Attention to the first tokens of a document (the sinks) after they have left the window.

A decoder that was pretrained without a window attends strongly to the first tokens of its context,
whatever these tokens say (attention sinks, Xiao et al. 2023). If the tokens leave the window, such
a model breaks. The keys and values of the first S tokens are therefore kept. A query sees them at
distances as if they stood right before its window: token p of a document sees sink j at the
distance min(p, F + S) - j, where F is the distance of the farthest key of a window.

In shapes, B is the number of rows of the batch, T of tokens of a segment, N of its blocks, S of
sinks, H of heads of queries, G of heads of keys, and K of numbers of a head. A head of keys serves
R = H / G consecutive heads of queries.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brt.ops.partial_attention import AttentionPart, attend_to_part
from brt.ops.positions import RotarySpeeds, rotate, rotations, take_positions
from brt.ops.softmax import MASKED


def sink_attention(
    queries: Float[Array, "B T H K"],
    keys: Float[Array, "B N S G K"],
    values: Float[Array, "B N S G K"],
    places: Int[Array, "B T"],
    bias: Float[Array, " H"] | None,
    *,
    farthest: int,
    speeds: RotarySpeeds | None = None,
) -> AttentionPart:
    """Returns the attention output of every token over the sinks beyond its window, and the
    log-sum-exp of its logits.

    Args:
      queries: already normalized and multiplied by any scale, but not rotated.
      keys, values: the keys and values of the first S tokens of the document of each block, not
        rotated. The entries of tokens that have not been read yet have no meaning and are not used.
      places: the index of each token in its document, 0 for the first.
      bias: the position bias of each head, which is the same for all sinks; None for no bias.
      farthest: the distance of the farthest key of a window. Sinks at a smaller or equal distance
        belong to the window and are masked here.
      speeds: the angles per token of rotary embeddings; None in models without them.

    Returns:
      The attention output [B, T, H, K] in the dtype of `values` and the log-sum-exp [B, T, H].
    """
    batch, length, heads, size = queries.shape
    blocks, count, groups = keys.shape[1:4]
    if speeds is not None:
        reach = farthest + count
        table = rotations(0, reach + 1, speeds)
        queries = rotate(queries, take_positions(table, jnp.minimum(places, reach)))
        sinks = take_positions(table, jnp.arange(count))
        keys = rotate(keys.reshape(batch * blocks, count, groups, size), sinks).reshape(keys.shape)
    shape = batch, blocks, length // blocks, groups, heads // groups, size
    # The axes of `rows` are [B, N, G, R, tokens of a block, K].
    rows = jnp.moveaxis(queries.reshape(shape), 2, 4)
    logits = jnp.einsum("bngrtk,bnsgk->bngrts", rows, keys, preferred_element_type=jnp.float32)
    if bias is not None:
        logits += bias.reshape(1, 1, groups, -1, 1, 1)
    order = jnp.arange(count).reshape(1, 1, 1, 1, 1, -1)
    left = places.reshape(batch, blocks, 1, 1, -1, 1) - order > farthest
    logits = jnp.where(left, logits, MASKED)
    merged = logits.reshape(batch, blocks, groups, -1, count)
    part = attend_to_part(merged, jnp.moveaxis(values, 2, 3))

    def by_token(x: Float[Array, "B N G RT ..."]) -> Float[Array, "B T H ..."]:
        """Returns x, the outputs or the log-sum-exps, with the axis of heads after the axis of
        tokens, and with all blocks on one axis of tokens.

        The axis RT of x has R * L entries, where L is the number of tokens of a block. The entry
        x[b, n, g, r * L + t] is the result of token n * L + t and head g * R + r.
        """
        x = x.reshape(*rows.shape[:5], *x.shape[4:])
        return jnp.moveaxis(x, 4, 2).reshape(batch, length, heads, *x.shape[5:])

    return AttentionPart(by_token(part.output).astype(values.dtype), by_token(part.lse))
