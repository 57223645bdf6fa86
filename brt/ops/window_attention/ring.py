"""Window attention of the tokens that a decoder reads or writes one by one, or a few at a time.

The keys of the last W tokens are in a ring buffer of W slots: the token at place p of a block is in
slot p mod W. The T tokens that are read now are not in the buffer yet. Their keys and values are
separate arrays, because joining them with the much larger buffer would copy it.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brt.ops.partial_attention import AttentionPart
from brt.ops.products import stacked_products
from brt.ops.softmax import MASKED, soft_capped, softmax_and_lse


class ReadyRing(NamedTuple):
    """Keys (normalized and rotated) and values, with the axes in the order that products read."""

    keys: Float[Array, "B G K W"]
    values: Float[Array, "B G W K"]


def ready_ring(keys: Float[Array, "B W G K"], values: Float[Array, "B W G K"]) -> ReadyRing:
    return ReadyRing(keys.transpose(0, 2, 3, 1), values.swapaxes(1, 2))


def ring_places(window: int, position: Int[Array, " B"]) -> Int[Array, "B W"]:
    """Returns the place of the token in each slot, relative to the start of the current block.

    `position` tokens of this block are in the ring buffer. Tokens of earlier blocks have negative
    places.
    """
    newest = position[:, None] - 1
    return newest - (newest - jnp.arange(window)[None]) % window


def ring_attention(
    queries: Float[Array, "B T H K"],
    ring: ReadyRing,
    own: tuple[Float[Array, "B T G K"], Float[Array, "B T G K"]],
    bias: Float[Array, "H W"] | None,
    read: Int[Array, " B"],
    position: Int[Array, " B"],
    *,
    attend_to_self: bool = True,
    null_keys: bool = False,
    soft_cap: float = 0.0,
) -> AttentionPart:
    """Returns the attention output of T tokens, at most W, over their windows.

    The arguments are those of `api.window_part`, with these exceptions.

    Args:
      queries: normalized, rotated and multiplied by any scale.
      own: the keys of the T tokens, normalized and rotated, and their values.
      read: how many tokens before the first of the T tokens may be read, for example the tokens of
        the same document. Numbers above W have the effect of W.
      position: the place of the first of the T tokens in its block.
    """
    batch, tokens, heads, size = queries.shape
    groups, window = ring.values.shape[1:3]
    nearest, ahead = 0 if attend_to_self else 1, jnp.arange(tokens)
    # `distances` [B, T, W + T] has the position of each token minus the position of each key. The
    # difference is negative for keys after the token.
    here = position[:, None] + ahead[None]
    places = jnp.concatenate([ring_places(window, position), here], axis=1)
    distances = here[:, :, None] - places[:, None]
    # The axes of `rows` are [B, G, R T, K], where R = H / G heads of queries share a head of keys.
    # With the queries as the left factor, the products are several times as fast on CPUs as in the
    # order that `jnp.einsum` chooses.
    rows = queries.reshape(batch, tokens, groups, -1, size).transpose(0, 2, 3, 1, 4)
    rows = rows.reshape(batch, groups, -1, size)
    new = [x.swapaxes(1, 2) for x in own]
    parts = stacked_products(rows, ring.keys), stacked_products(rows, new[0].swapaxes(2, 3))
    logits = jnp.concatenate(parts, axis=-1).reshape(batch, groups, -1, tokens, window + tokens)
    in_window = (distances >= nearest) & (distances < window + nearest)
    readable = read[:, None, None] + ahead[None, :, None]
    hidden = (distances > readable)[:, None, None]
    logits = soft_capped(logits, soft_cap)
    if null_keys:
        logits = jnp.where(hidden, 0.0, logits)
    if bias is not None:
        columns = jnp.clip(distances - nearest, 0, window - 1)
        by_group = bias.reshape(groups, heads // groups, window)
        logits += jnp.moveaxis(jnp.take(by_group, columns, axis=2), 2, 0)
    seen = in_window[:, None, None]
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
