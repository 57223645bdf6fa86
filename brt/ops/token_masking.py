"""Masked language modelling: the random choice of tokens to predict (Devlin et al. 2019, 3.1).

A row has R slots, each of which holds a token to predict or is unused.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.ops.top_k import top_k

# Of the tokens to predict, 80 % are replaced by the mask token and 10 % by a random token. The
# other tokens to predict stay as they are.
MASK_SHARE, RANDOM_SHARE = 0.8, 0.1
# The loss processes the slots of a row in chunks, whose size must divide the number of slots. If a
# row has more slots than this constant, their number is therefore rounded up to a multiple of the
# constant. Without this, the number might have no large divisor.
_CHUNK = 128


class MaskedTokens(NamedTuple):
    """Rows of tokens; the model has to predict up to R tokens of each row."""

    inputs: Int[Array, "B T"]  # int32, the tokens that the model reads
    positions: Int[Array, "B R"]  # int32, the positions of the tokens to predict, in random order
    targets: Int[Array, "B R"]  # int32, the original tokens at these positions
    # True for slots with a token to predict, which are the first slots of a row
    scored: Bool[Array, "B R"]


def mask_tokens(
    tokens: Int[Array, "B T"],
    valid: Bool[Array, "B T"],
    keys: Array,
    *,
    share: float,
    mask_id: int,
) -> MaskedTokens:
    """Chooses a `share` of each row's valid tokens to predict, and replaces most of them.

    The choice for a row depends only on its key in `keys`. `mask_id` must exceed all other tokens.
    """
    length = tokens.shape[1]
    slots = prediction_slots(length, share)
    draw = jax.vmap(lambda key: _draw(key, length, slots, mask_id))
    order, fate, random = draw(keys)
    positions = top_k(jnp.where(valid, order, -1.0), slots)[1]
    scored = jnp.arange(slots)[None] < prediction_counts(valid, share)[:, None]
    targets = jnp.take_along_axis(tokens, positions, axis=1)
    changed = jnp.where(fate < MASK_SHARE + RANDOM_SHARE, random, targets)
    changed = jnp.where(fate < MASK_SHARE, mask_id, changed)
    rows = jnp.arange(len(tokens))[:, None]
    inputs = tokens.at[rows, positions].set(jnp.where(scored, changed, targets))
    return MaskedTokens(inputs, positions, targets, scored)


def _draw(
    key: Array, length: int, slots: int, mask_id: int
) -> tuple[Float[Array, " T"], Float[Array, " R"], Int[Array, " R"]]:
    order_key, fate_key, token_key = jax.random.split(key, 3)
    random = jax.random.randint(token_key, (slots,), 0, mask_id, jnp.int32)
    return jax.random.uniform(order_key, (length,)), jax.random.uniform(fate_key, (slots,)), random


def prediction_counts(valid: Bool[Array, "B T"], share: float) -> Int[Array, " B"]:
    """Returns the number of tokens to predict, at least one in a row with a valid token."""
    count = jnp.sum(valid, axis=1)
    predicted = jnp.maximum(jnp.round(count * share).astype(jnp.int32), 1)
    return jnp.minimum(predicted, count)


def prediction_slots(length: int, share: float) -> int:
    """Returns R for rows of `length` tokens: enough slots for any result of `prediction_counts`."""
    # One slot is added, because `prediction_counts` computes in float32 and may round a half up
    # where Python rounds the half down.
    slots = max(round(length * share) + 1, 1)
    if slots > _CHUNK:
        slots = -(-slots // _CHUNK) * _CHUNK
    return min(slots, length)
