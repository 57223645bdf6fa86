"""Window attention of the tokens that a decoder reads or writes one by one, or a few at a time.

The keys of the last W tokens are in a ring buffer of W slots: the token at place p of a block is
written to slot p mod W, where it replaces the token W places before. The tokens that are read now
are not in the ring buffer yet; their keys and values are separate arrays, so that the buffer, which
is much larger, is only read and not copied.

In shapes, B is the number of rows of the batch, T of tokens that are read, W of slots, H of heads
of queries, G of heads of keys, and K of numbers of a head. A head of keys serves R = H / G
consecutive heads of queries.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brt.ops.few_rows import stacked_products
from brt.ops.partial_attention import AttentionPart
from brt.ops.softmax import MASKED, softmax_and_lse


class ReadyRing(NamedTuple):
    """A ring buffer of keys and values in the order of axes in which products read them.

    Attributes:
      keys: [B, G, K, W], normalized and rotated as attention needs them.
      values: [B, G, W, K].
    """

    keys: Float[Array, "B G K W"]
    values: Float[Array, "B G W K"]


def ready_ring(keys: Float[Array, "B W G K"], values: Float[Array, "B W G K"]) -> ReadyRing:
    """Returns keys, which are normalized and rotated, and values as a `ReadyRing`."""
    return ReadyRing(keys.transpose(0, 2, 3, 1), values.swapaxes(1, 2))


def ring_places(window: int, position: Int[Array, ""]) -> Int[Array, " W"]:
    """Returns the place of the token in each slot, relative to the start of the open block.

    Tokens of the open block have the places 0 to `position` - 1, and earlier tokens have negative
    places.

    Args:
      window: W, the number of slots.
      position: the number of tokens of the open block that are in the ring buffer.
    """
    return position - 1 - (position - 1 - jnp.arange(window)) % window


def ring_attention(
    queries: Float[Array, "B T H K"],
    ring: ReadyRing,
    own: tuple[Float[Array, "B T G K"], Float[Array, "B T G K"]],
    bias: Float[Array, "H W"] | None,
    read: Int[Array, " B"],
    position: Int[Array, ""],
    *,
    attend_to_self: bool = True,
    null_keys: bool = False,
) -> AttentionPart:
    """Returns the attention output of T tokens over their windows, and the log-sum-exp of their
    logits.

    Args:
      queries: normalized, rotated and multiplied by any scale.
      ring: keys and values of the tokens before.
      own: keys, normalized and rotated, and values of the T tokens, at most W.
      bias: float32, the bias of each head and distance; column 0 is for the nearest key that a
        token sees. None stands for no bias.
      read: the number of tokens before the first of the T tokens that may be read, such as the
        number of tokens of its document. Larger numbers than W have no effect.
      position: the place of the first of the T tokens in its block.
      attend_to_self: True if the nearest key is the token itself, False if it is the token before.
      null_keys: True makes keys of the window that `read` hides count as zero keys with zero
        values.

    Returns:
      The output [B, T, H, K] in the dtype of the values and the log-sum-exp [B, T, H], float32.
    """
    batch, tokens, heads, size = queries.shape
    groups, window = ring.values.shape[1:3]
    nearest, ahead = 0 if attend_to_self else 1, jnp.arange(tokens)
    # `distances` has the axes [T, W + T], the number of tokens from each key to each token. Those
    # to later tokens are negative.
    places = jnp.concatenate([ring_places(window, position), position + ahead])
    distances = position + ahead[:, None] - places[None]
    # The axes of `rows` are [B, G, R T, K]. With the queries as the left factor, the products are
    # several times as fast on CPUs as in the order that `jnp.einsum` chooses.
    rows = queries.reshape(batch, tokens, groups, -1, size).transpose(0, 2, 3, 1, 4)
    rows = rows.reshape(batch, groups, -1, size)
    new = [x.swapaxes(1, 2) for x in own]
    parts = stacked_products(rows, ring.keys), stacked_products(rows, new[0].swapaxes(2, 3))
    logits = jnp.concatenate(parts, axis=-1).reshape(batch, groups, -1, tokens, window + tokens)
    in_window = (distances >= nearest) & (distances < window + nearest)
    readable = read[:, None, None] + ahead[None, :, None]
    hidden = (distances[None] > readable)[:, None, None]
    if null_keys:
        logits = jnp.where(hidden, 0.0, logits)
    if bias is not None:
        columns = jnp.clip(distances - nearest, 0, window - 1)
        by_group = bias.reshape(groups, heads // groups, window)
        logits += jnp.take(by_group, columns, axis=2)[None]
    seen = in_window[None, None, None]
    if not null_keys:
        seen &= ~hidden
    weights, lse = softmax_and_lse(jnp.where(seen, logits, MASKED))
    if null_keys:
        weights = jnp.where(hidden, 0.0, weights)
    weights = weights.astype(own[1].dtype).reshape(batch, groups, -1, window + tokens)
    before, here = jnp.split(weights, [window], axis=-1)
    output = stacked_products(before, ring.values) + stacked_products(here, new[1])
    output = output.astype(own[1].dtype).reshape(batch, groups, -1, tokens, size)
    output = output.transpose(0, 3, 1, 2, 4).reshape(queries.shape)
    return AttentionPart(output, jnp.moveaxis(lse, 3, 1).reshape(batch, tokens, heads))
